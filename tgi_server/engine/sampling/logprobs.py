"""Log-probabilities of tokens: those chosen, those most likely, those of the prompt."""

import torch
from torch import Tensor

# Ties with the last of the n most likely tokens are reported too; this many at most.
ROOM_FOR_TIES = 16
_CHUNK_ELEMENTS = 2**25


def prompt_logprobs(logits: Tensor, next_ids: Tensor) -> Tensor:
    """Log-probability of each prompt token after those before it: float32 `[tokens]`.

    logits: `[tokens, vocab]` in any float type; next_ids: int64 `[tokens]`, what follows each position. Works in
    pieces, so that a long prompt does not take a float32 copy of all its logits.
    """
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    pieces = [
        chosen_logprobs(torch.log_softmax(part, -1, dtype=torch.float32), ids)
        for part, ids in zip(logits.split(rows), next_ids.split(rows), strict=True)
    ]
    return torch.cat(pieces)


def chosen_logprobs(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """`[rows, vocab]`, `[rows]` -> `[rows]`."""
    return logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)


def top_logprobs(logprobs: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The ids and log-probabilities of the `most` likeliest tokens and some more, best first: `[rows, width]` each.

    How many of them are ties with a row's n-th is not known before they are on the host; see `keep_top`.
    """
    top = logprobs.topk(min(most + ROOM_FOR_TIES, logprobs.shape[1]))
    return top.indices, top.values


def keep_top(ids: list[int], logprobs: list[float], n: int) -> list[tuple[int, float]]:
    """The first n of one row of `top_logprobs` with those equal to the n-th, as TGI reports them.

    Tokens that cannot be chosen are left out.
    """
    last = logprobs[min(n, len(logprobs)) - 1]
    kept = [
        (token, logprob)
        for token, logprob in zip(ids, logprobs, strict=True)
        if logprob >= last and logprob != float("-inf")
    ]
    return sorted(kept, key=lambda pair: (-pair[1], pair[0]))
