"""Compares, at load, the logits of a model that is computed in different ways.

A model computes two packed prompts and a decode step; for longer texts a prompt in two chunks, too. A spec in plain
torch is compared with `transformers` and its own attention, and models with kernels are compared with the spec.

If a model is split, all shards do this together, each with its slices. This cannot show if the slices themselves are
right: they follow from the plan of the architecture.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tgi_server.engine import proofs
from tgi_server.engine.backends.attention.base import ChunkSpan, ForwardMetadata
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.backends.base import PagedModel, PassInput
from tgi_server.engine.backends.generic import GenericModel
from tgi_server.engine.backends.own_pass import LONG, SHORT, probe_tokens
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.parallel import ShardGroup, fault_of_any

# Tokens of the text with which a backend is proved: several blocks, and several parts with split-KV attention.
_LONG_RUN = 300
# Maximum tolerance, for models whose logits change by more than the usual one through rounding alone.
_MOST_NOISE = 0.3


class LogitsProbe:
    """The logits of some texts, by which models are judged.

    All shards of a model make one, and call it in the same order.
    """

    def __init__(
        self,
        model: GenericModel | ReferenceModel,
        group: ShardGroup | None = None,
        *,
        long: bool = False,
        kv_format: KVFormat | None = None,
        expected: Tensor | None = None,
    ) -> None:
        """model: computes the expected logits with attention in plain torch. group: the shards of the model; None for a
        single shard. long: use texts of several blocks. kv_format: the format of the KV cache; None: the model's dtype.
        expected: the logits of short texts, if they are known.
        """
        self._model = model
        self._group = group
        self._length = min(_LONG_RUN, model.positions or _LONG_RUN) if long else None
        self._kv_format = kv_format or KVFormat(model.attention.dtype)
        logits = self._in_plain_torch() if expected is None else expected
        self._expected = logits.to(model.attention.dtype)  # some models return logits in float32
        self._allowance = proofs.FP8_KEYS if self._kv_format.fp8 else 0.0
        self._noise: float | None = None

    def fault(self, model: PagedModel, name: str, rounding: float = 0.0) -> str | None:
        """Checks the current configuration of a model. Returns the reason not to use it; None if it is right.

        Reallocates the model's KV blocks. All shards get the same result. name: the method that is checked, for
        messages. rounding: further difference of the logits that is allowed, as a share of their norm.
        """
        fault = self._fault(model, name, self._allowance + rounding)
        if fault is None or self._expected.dtype is torch.float32:
            return fault
        if self._noise is None:
            self._noise = self._rounding_noise() - proofs.TOLERANCES["logits"][self._expected.dtype]
        return self._fault(model, name, max(self._allowance, self._noise) + rounding)

    def _fault(self, model: PagedModel, name: str, allowance: float) -> str | None:
        def cases() -> Iterator[proofs.Case]:
            yield "in its logits", self._logits(model), self._expected

        fault = proofs.fault_of(f"the model with {name}", cases, "logits", allowance, proofs.logits_error)
        return fault_of_any(fault, self._group)

    def _logits(self, model: PagedModel) -> Tensor:
        model.allocate(2 * blocks_of(self._length or 1, model.attention.block_size) + 1)
        return short_logits(model) if self._length is None else long_logits(model, self._length)

    def _in_plain_torch(self) -> Tensor:
        model, before = self._model, self._model.attention
        model.attention = GatherAttention(before.shape, before.device, before.dtype, self._kv_format)
        try:
            return self._logits(model)
        finally:
            model.attention = before

    def _rounding_noise(self) -> float:
        """Returns the difference of logits that rounding alone can make, up to _MOST_NOISE.

        Rounding adds up over the layers, and in a mixture of experts whose router is undecided the last bit of a number
        may choose other experts. So the logits are computed again with each layer's output a last bit off.
        """
        step = torch.finfo(self._expected.dtype).eps

        def round_otherwise(_: Any, __: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            signs = torch.ones_like(output)
            signs[..., ::2] = -1
            return output * (1 + step * signs)

        plain = self._in_plain_torch()
        hooks = [module.register_forward_hook(round_otherwise) for module in self._model.rounding_modules()]
        try:
            return min(proofs.logits_error(self._in_plain_torch(), plain), _MOST_NOISE)
        finally:
            for hook in hooks:
                hook.remove()


def text_logits(model: PagedModel, tokens: Tensor, wanted: Tensor | None) -> Tensor:
    """Returns the logits of the wanted tokens of a text, or of all, in one pass: [wanted, vocab_size].

    tokens, wanted: [...] int64.
    """
    _allocate_states(model)
    count, size, device = len(tokens), model.attention.block_size, tokens.device
    positions = torch.arange(count, device=device)
    metadata = ForwardMetadata(
        slots=size + positions,
        block_tables=torch.arange(1, blocks_of(count, size) + 1, dtype=torch.int32, device=device)[None],
        kv_lengths=torch.tensor([count], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        decoding=0,
        chunks=[ChunkSpan(0, count, count)],
        max_kv_length=count,
        state_slots=[1],
    )
    return model.forward(PassInput(tokens, positions, metadata, wanted))


def short_logits(model: PagedModel) -> Tensor:
    """Returns the last logits of both prompts, then those of one more token of each: [4, vocab_size]."""
    _allocate_states(model)
    tables = torch.tensor([[1], [2]], device=model.attention.device)
    passes = [([(0, 0, LONG), (1, 0, SHORT)], 0), ([(0, LONG, 1), (1, SHORT, 1)], 2)]
    return torch.cat([_pass(model, tables, *each) for each in passes])


def long_logits(model: PagedModel, length: int) -> Tensor:
    """Returns the last logits of every part of a run in which a prompt of several blocks is computed in two chunks.

    length: tokens of its longest text. The second chunk is computed while a shorter text decodes. A backend that can
    split attention over a text attends to the longer text in several parts.
    """
    _allocate_states(model)
    half, shorter = length // 2, max(1, length // 3)
    count = blocks_of(length, model.attention.block_size)
    tables = torch.arange(2 * count, device=model.attention.device).flip(0).view(2, count) + 1
    passes = [
        ([(0, 0, half), (1, 0, shorter)], 0),
        ([(1, shorter, 1), (0, half, length - 1 - half)], 1),
        ([(0, length - 1, 1), (1, shorter + 1, 1)], 2),
    ]
    return torch.cat([_pass(model, tables, *each) for each in passes])


def _allocate_states(model: PagedModel) -> None:
    """Allocates empty slots 1 and 2 for the two texts of a run."""
    if model.states is not None:
        model.states.allocate(3)


def blocks_of(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _pass(model: PagedModel, tables: Tensor, spans: list[tuple[int, int, int]], decoding: int) -> Tensor:
    """Computes parts of two texts. Returns the logits of the last token of each: [spans, vocab_size].

    spans: (row of the tables, first position, tokens) of each part. decoding: how many of them decode; the others are
    chunks of prompts.
    """
    device, size = model.attention.device, model.attention.block_size
    places = [torch.arange(start, start + count, device=device) for _, start, count in spans]
    first = [0, *accumulate(count for *_, count in spans)]
    ends = torch.tensor(first, device=device)
    lengths = [start + count for _, start, count in spans]
    slots = [row + 1 for row, *_ in spans]
    metadata = ForwardMetadata(
        slots=torch.cat(
            [tables[row, place // size] * size + place % size for (row, *_), place in zip(spans, places, strict=True)]
        ),
        block_tables=tables[[row for row, *_ in spans]].to(torch.int32),
        kv_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        query_starts=ends.to(torch.int32),
        decoding=decoding,
        chunks=[
            ChunkSpan(begin, count, length) for begin, (*_, count), length in zip(first, spans, lengths, strict=False)
        ][decoding:],
        max_kv_length=max(lengths),
        state_slots=slots,
        row_slots=torch.tensor(slots[:decoding], device=device),
    )
    positions = torch.cat(places)
    tokens = probe_tokens(model.source, max(lengths))[positions]
    return model.forward(PassInput(tokens, positions, metadata, ends[1:] - 1))
