"""First weights that can already copy: an induction circuit in the first two layers.

A model that answers with words of its prompt needs attention heads that find where the current token stood before and
bring what followed it: a head of one layer notes at each token which one came before, and a head of the next looks
there for the current token (Olsson et al., "In-context Learning and Induction Heads", 2022). From random weights such
heads take longer to appear than the demo model is trained for. So they are put in by hand, and training takes them
from there like any other weights.
"""

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

_CONSTANT = 0
"""The channel of the residual stream that has the same value at every token, for heads that look at positions only."""
_CONSTANT_VALUE = 0.5
_EMBEDDING_SCALE = 0.06
_SHARPEST = 5
"""How many of the fastest rotary pairs tell the token before from its neighbours."""
_POSITION_GAIN = 0.6
_SLOWEST = 10
"""How many of the slowest rotary pairs hardly turn within a few hundred tokens, and so compare contents."""
_MATCH_GAIN = 2.5
_NOTE_GAIN = 0.12
_COPY_GAIN = 1.0


@torch.no_grad()
def install(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Writes the circuit into the model's embeddings and first two layers.

    In the first layer, half of the heads note the token before and half the one before that. In the second, a token
    looks for the place where the token before is itself and the one before that is its own predecessor, and brings
    what stands there.
    """
    config = model.config
    embeddings = model.model.embed_tokens.weight
    embeddings.normal_(0.0, _EMBEDDING_SCALE, generator=generator)
    embeddings[:, _CONSTANT] = _CONSTANT_VALUE
    size, groups = config.head_dim, config.num_key_value_heads
    repeats = config.num_attention_heads // groups
    notes = groups // 2 * size
    note, before, earlier = _orthonormal(3 * notes, config.hidden_size, generator).split(notes)
    carried = _orthonormal(groups * size, config.hidden_size, generator)
    slow = _slow_dimensions(size)
    halves = slow.chunk(2)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        distance, part = divmod(group, groups // 2)
        noted = slice(part * size, (part + 1) * size)
        look, seen = _at_distance(distance + 1, size, config.rope_parameters["rope_theta"])
        first.k_proj.weight[own, _CONSTANT] = seen
        first.v_proj.weight[own] = note[noted]
        compared = torch.randperm(notes, generator=generator)[: len(slow) // 2]
        second.k_proj.weight[own] = 0.0
        second.k_proj.weight[group * size + halves[0]] = _MATCH_GAIN * before[compared]
        second.k_proj.weight[group * size + halves[1]] = _MATCH_GAIN * earlier[compared]
        second.v_proj.weight[own] = carried[own]
        for head in range(group * repeats, (group + 1) * repeats):
            queries = slice(head * size, (head + 1) * size)
            first.q_proj.weight[queries, _CONSTANT] = look
            first.o_proj.weight[:, queries] = _NOTE_GAIN * (before, earlier)[distance][noted].T / repeats
            second.q_proj.weight[queries] = 0.0
            second.q_proj.weight[head * size + halves[0]] = _MATCH_GAIN * note[compared]
            second.q_proj.weight[head * size + halves[1]] = _MATCH_GAIN * before[compared]
            second.o_proj.weight[:, queries] = _COPY_GAIN * carried[own].T / repeats


def _at_distance(distance: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """A query and a key, `[head_dim]` each, whose rotated product is greatest when they are so many tokens apart."""
    half = size // 2
    angles = distance * theta ** (-torch.arange(half) / half)
    gains = torch.zeros(half)
    gains[:_SHARPEST] = _POSITION_GAIN * math.sqrt(size / 4)
    key = torch.cat([gains, torch.zeros(half)])
    query = torch.cat([gains * torch.cos(angles), -gains * torch.sin(angles)])
    return query, key


def _slow_dimensions(size: int) -> Tensor:
    half = size // 2
    slow = torch.arange(half - _SLOWEST, half)
    return torch.stack([slow, slow + half], dim=1).flatten()


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Rows of length one that are orthogonal to each other and leave the constant channel alone."""
    basis = torch.linalg.qr(torch.randn(columns - 1, rows, generator=generator)).Q.T
    return torch.cat([torch.zeros(rows, 1), basis], dim=1)
