"""Choosing one token of each row: the best, or one drawn from the distribution."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.sampling.token_mask import TokenMask
from tgi_server.engine.sampling.weights import token_weights

_BLOCK = 256
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def best(scores: Tensor, mask: TokenMask | None = None) -> Tensor:
    """The argmax `[rows]` of `[rows, tokens]` in any float type, the first of equals.

    mask: of some rows, for scores with which `has_kernels`.
    """
    if has_kernels(scores):
        if mask is None:
            return torch.ops.oatmill.argmax(scores)
        return torch.ops.oatmill.argmax(scores, mask.bits, mask.positions)
    assert mask is None
    # What argmax gives; on a CPU argmax converts bfloat16 element by element, and takes six times as long.
    return scores.max(-1).indices


def best_logprobs(scores: Tensor, chosen: Tensor, wanted: Sequence[int], mask: TokenMask | None = None) -> Tensor:
    """Log-probabilities, float32 `[wanted]`, of what `best` chose in the rows `wanted`, for scores that `has_kernels`.

    Of rows with a mask: among the tokens that it allows.
    """
    if mask is None:
        return torch.ops.oatmill.peak_logprobs(scores, chosen, wanted)
    return torch.ops.oatmill.peak_logprobs(scores, chosen, wanted, mask.bits, mask.positions)


def has_kernels(scores: Tensor) -> bool:
    """Whether the engine has kernels of its own for them."""
    return scores.device.type == "cpu" and scores.dtype in _KERNEL_DTYPES and load_kernels()


def draw(scores: Tensor, numbers: Tensor) -> Tensor:
    """Inverts the cumulative distribution of softmax(scores) at `numbers`.

    scores: float32 `[rows, tokens]`; numbers: float64 `[rows]` in [0, 1). Returns int64 `[rows]`: the first token,
    in the vocabulary's order, at which the running sum of weights exceeds `number * sum`. The sums are taken block
    by block, and only the block that holds the token is looked into.
    """
    weights = token_weights(scores)
    tokens = weights.shape[1]
    whole = tokens - tokens % _BLOCK
    blocks = weights[:, :whole].unflatten(1, (whole // _BLOCK, _BLOCK)).sum(2)
    if whole < tokens:
        blocks = torch.cat((blocks, weights[:, whole:].sum(1, keepdim=True)), dim=1)
    running = blocks.cumsum(1)
    total = running[:, -1]
    # Below the sum however it is rounded: a number is at most 1 - 2**-53, the sum below 2**63.
    aim = (numbers * total.to(torch.float64)).to(torch.int64).unsqueeze(1)
    block = (running <= aim).sum(1, keepdim=True).clamp_max_(blocks.shape[1] - 1)
    aim = aim - (running - blocks).gather(1, block)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=scores.device)
    within = weights.gather(1, ids.clamp_max(tokens - 1)).masked_fill_(ids >= tokens, 0).cumsum(1)
    token = block * _BLOCK + (within <= aim).sum(1, keepdim=True)
    return token.squeeze(1).clamp_max_(tokens - 1)
