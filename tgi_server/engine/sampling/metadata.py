"""Sampling metadata: for each rule of sampling, the rows to which it applies, as tensors on the device.

They are built again only when the set of rows changes, so that most steps have no loops over rows and no copies from
the host.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.memory import HOST, to_device
from tgi_server.engine.sampling.random import as_int64

# Scores that are processed at once: limits intermediate tensors, which take 8 bytes per element.
_ELEMENTS_AT_ONCE = 2**24
# The same for each thread of a CPU: they stay in a core's cache, which is three times as fast as all rows at once.
_CPU_ELEMENTS_AT_ONCE = 2**17
# A lower temperature could make scores infinite; this one is as good as greedy.
_LOWEST_TEMPERATURE = 1e-20


@dataclass(frozen=True, slots=True)
class Row:
    """The request of a row.

    sequence_slot: its slot in the counts of prompt and generated tokens; generated_slot: its slot in the counts of
    generated tokens. None: they are not counted.
    """

    parameters: SamplingParameters
    report: ReportParameters
    prompt_length: int
    sequence_slot: int | None
    generated_slot: int | None


def is_plain(parameters: SamplingParameters, report: ReportParameters) -> bool:
    """Returns True if a request needs only the argmax of the logits, without any report."""
    return is_greedy(parameters) and not (report.logprobs or report.top_n_tokens or report.scored_token_ids)


def is_greedy(parameters: SamplingParameters) -> bool:
    """Returns True if a request always takes the argmax of the model's logits."""
    return not (parameters.do_sample or changes_logits(parameters))


def top_logits(parameters: SamplingParameters, report: ReportParameters) -> int | None:
    """Returns how many of the largest logits determine a request's tokens and reports; None: all logits.

    Logits equal to the last of them are needed as well. Reported probabilities are those after `top_k`.
    """
    if is_plain(parameters, report):
        return 1
    by_top_k = parameters.do_sample and parameters.top_k and not changes_logits(parameters)
    return parameters.top_k if by_top_k and not report.scored_token_ids else None


def most_logits(counts: Iterable[int | None]) -> int | None:
    """Returns the largest of several results of `top_logits`; 1 if there are none."""
    known = list(counts)
    return None if None in known else max(cast(list[int], known), default=1)


def changes_logits(parameters: SamplingParameters) -> bool:
    """Returns True if a logits processor may change the order of the model's logits."""
    return bool(
        parameters.watermark
        or parameters.logit_bias
        or parameters.min_tokens
        or counts_sequence(parameters)
        or counts_generated(parameters)
    )


def counts_sequence(parameters: SamplingParameters) -> bool:
    return parameters.repetition_penalty != 1.0 or parameters.frequency_penalty != 0.0


def counts_generated(parameters: SamplingParameters) -> bool:
    return parameters.presence_penalty != 0.0 or parameters.count_penalty != 0.0


@dataclass(frozen=True, slots=True)
class RowIndex:
    """A selection of a tensor's rows. index: int64 `[k]` on the device; None: all rows."""

    index: Tensor | None

    def take(self, rows: Tensor) -> Tensor:
        return rows if self.index is None else rows.index_select(0, self.index)

    def put(self, rows: Tensor, part: Tensor) -> Tensor:
        """Writes `part` to the selected rows of `rows`, perhaps in place. Returns the result."""
        return part if self.index is None else rows.index_copy_(0, self.index, part)


@dataclass(frozen=True, slots=True)
class RowParameter:
    """The rows of the scores to which a rule applies. values: its parameter of each, `[k, 1]`. largest: maximum."""

    row_index: RowIndex
    values: Tensor
    largest: float

    def apply(self, scores: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return self.row_index.put(scores, change(self.row_index.take(scores), self.values))


@dataclass(frozen=True, slots=True)
class Penalty:
    """A penalty for counted tokens. slots: slots of its rows in the pool of counts, int64 `[k]`."""

    rule: RowParameter
    slots: Tensor

    def apply(self, scores: Tensor, pool: Tensor, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        counts = pool.index_select(0, self.slots)
        return self.rule.apply(scores, lambda part, penalties: change(part, counts, penalties))


@dataclass(frozen=True, slots=True)
class Bias:
    """Logit biases. places: indices of the biased tokens in the flattened scores, int64. values: float32, one each."""

    places: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class MinTokensBan:
    """Tokens that are banned until a row has generated a minimum number of tokens.

    places: their indices in the flattened scores. rows: their rows of the scores. least: the minimum number. All int64
    `[k]`.
    """

    places: Tensor
    rows: Tensor
    least: Tensor


@dataclass(frozen=True, slots=True)
class Counted:
    """The rows whose tokens are counted. slots: their slots in the pool of counts, int64 `[k]`."""

    row_index: RowIndex
    slots: Tensor


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Parameters of rows for `row_kernel.choose`.

    numbers: temperature, top_p and min_p, float64 `[k, 3]`. top_k: int64 `[k]`.
    """

    numbers: Tensor
    top_k: Tensor


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The warpers and seeds of the rows that sample, `row_index`. The warpers' row indices refer to these rows.

    seeds: int64 `[k]`. fused: the same parameters for the fused kernel; None: it is not used for these rows.
    """

    row_index: RowIndex
    seeds: Tensor
    fused: RowSettings | None
    temperature: RowParameter | None
    top_k: RowParameter | None
    top_p: RowParameter | None
    typical_p: RowParameter | None
    min_p: RowParameter | None


@dataclass(frozen=True, slots=True)
class Report:
    """The rows with a report. positions: their rows of the logits. counts: number of reported tokens of each."""

    row_index: RowIndex
    positions: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The rules for rows of the logits that need more than an argmax.

    processed: the rows of the logits that become the scores; all other row indices refer to the scores. state_rows:
    their rows in the sampler's state, int64. prompt_lengths: in tokens, int64. A rule is None if it applies to no row.
    """

    processed: RowIndex
    state_rows: Tensor
    prompt_lengths: Tensor
    watermark: RowIndex | None
    repetition: Penalty | None
    frequency: Penalty | None
    presence: Penalty | None
    count: Penalty | None
    bias: Bias | None
    min_tokens_ban: MinTokensBan | None
    sampling: SamplingTensors | None
    logprobs: Report | None
    top_tokens: Report | None
    sequence_counts: Counted | None
    generated_counts: Counted | None


class MetadataBuilder:
    """Builds sampling metadata: loops over rows on the host once, and copies the results to the device."""

    def __init__(self, vocab_size: int, device: torch.device, *, row_kernel: bool = False) -> None:
        """row_kernel: True if the fused kernel is used for rows that sample."""
        self._vocab_size = vocab_size
        self._device = device
        self._row_kernel = row_kernel
        elements = _ELEMENTS_AT_ONCE if device != HOST else _CPU_ELEMENTS_AT_ONCE * torch.get_num_threads()
        self._rows_at_once = max(1, elements // vocab_size)

    def build(self, rows: Sequence[int], state: Mapping[int, Row]) -> tuple[SamplingMetadata, ...]:
        """Returns the metadata of `rows`, split into groups by memory; empty if argmax is enough for all rows.

        state: the rows that need more than an argmax.
        """
        positions = [i for i, row in enumerate(rows) if row in state]
        size = self._rows_at_once
        groups = [positions]
        if self._row_kernel:  # it does not know typical_p; whether it computes a row must not depend on other rows
            typical = {i for i in positions if state[rows[i]].parameters.typical_p != 1.0}
            groups = [[i for i in positions if i not in typical], sorted(typical)]
        pieces = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
        return tuple(self._piece(piece, rows, state) for piece in pieces)

    def _piece(self, positions: Sequence[int], rows: Sequence[int], state: Mapping[int, Row]) -> SamplingMetadata:
        entries = [state[rows[i]] for i in positions]
        parameters = [entry.parameters for entry in entries]
        sequence_slots = [entry.sequence_slot for entry in entries]
        generated_slots = [entry.generated_slot for entry in entries]
        return SamplingMetadata(
            processed=self._in_order(positions, len(rows)),
            state_rows=self._integers([rows[i] for i in positions]),
            prompt_lengths=self._integers([entry.prompt_length for entry in entries]),
            watermark=self._row_index([p.watermark for p in parameters]),
            repetition=self._penalty([p.repetition_penalty for p in parameters], 1.0, sequence_slots),
            frequency=self._penalty([p.frequency_penalty for p in parameters], 0.0, sequence_slots),
            presence=self._penalty([p.presence_penalty for p in parameters], 0.0, generated_slots),
            count=self._penalty([p.count_penalty for p in parameters], 0.0, generated_slots),
            bias=self._bias([p.logit_bias for p in parameters]),
            min_tokens_ban=self._min_tokens_ban(parameters),
            sampling=self._sampling(entries),
            logprobs=self._report([int(entry.report.logprobs) for entry in entries], positions),
            top_tokens=self._report([entry.report.top_n_tokens for entry in entries], positions),
            sequence_counts=self._counted(sequence_slots),
            generated_counts=self._counted(generated_slots),
        )

    def _sampling(self, entries: Sequence[Row]) -> SamplingTensors | None:
        row_index = self._row_index([entry.parameters.do_sample for entry in entries])
        if row_index is None:
            return None
        drawn = [entry.parameters for entry in entries if entry.parameters.do_sample]
        top_k = [min(p.top_k, self._vocab_size) for p in drawn]
        return SamplingTensors(
            row_index=row_index,
            seeds=self._integers([as_int64(p.seed) for p in drawn]),
            fused=self._fused(drawn) if self._row_kernel else None,
            temperature=self._row_parameter([temperature_of(p) for p in drawn], 1.0, torch.float32),
            top_k=self._row_parameter(top_k, 0, torch.int64),
            top_p=self._row_parameter([p.top_p for p in drawn], 1.0, torch.float64),
            typical_p=self._row_parameter([p.typical_p for p in drawn], 1.0, torch.float64),
            min_p=self._row_parameter([p.min_p for p in drawn], 0.0, torch.float32),
        )

    def _fused(self, drawn: Sequence[SamplingParameters]) -> RowSettings | None:
        if any(p.typical_p != 1.0 for p in drawn):
            return None
        numbers = [number for p in drawn for number in (temperature_of(p), p.top_p, p.min_p)]
        top_k = self._integers([min(p.top_k, self._vocab_size) for p in drawn])
        return RowSettings(to_device(numbers, torch.float64, self._device).view(-1, 3), top_k)

    def _penalty(self, values: Sequence[float], off: float, slots: Sequence[int | None]) -> Penalty | None:
        rule = self._row_parameter(values, off, torch.float32)
        if rule is None:
            return None
        concerned = [slot for slot, value in zip(slots, values, strict=True) if slot is not None and value != off]
        return Penalty(rule, self._integers(concerned))

    def _row_parameter(self, values: Sequence[float], off: float, dtype: torch.dtype) -> RowParameter | None:
        row_index = self._row_index([value != off for value in values])
        if row_index is None:
            return None
        concerned = [value for value in values if value != off]
        return RowParameter(row_index, to_device(concerned, dtype, self._device).unsqueeze(1), max(concerned))

    def _bias(self, biases: Sequence[Mapping[int, float]]) -> Bias | None:
        entries = [(row * self._vocab_size + i, value) for row, bias in enumerate(biases) for i, value in bias.items()]
        if not entries:
            return None
        places, values = zip(*entries, strict=True)
        return Bias(self._integers(places), to_device(values, torch.float32, self._device))

    def _min_tokens_ban(self, parameters: Sequence[SamplingParameters]) -> MinTokensBan | None:
        entries = [
            (row, token, p.min_tokens) for row, p in enumerate(parameters) if p.min_tokens for token in p.late_tokens
        ]
        if not entries:
            return None
        rows, tokens, least = zip(*entries, strict=True)
        places = [row * self._vocab_size + token for row, token in zip(rows, tokens, strict=True)]
        return MinTokensBan(self._integers(places), self._integers(rows), self._integers(least))

    def _report(self, counts: Sequence[int], positions: Sequence[int]) -> Report | None:
        row_index = self._row_index([count > 0 for count in counts])
        if row_index is None:
            return None
        return Report(
            row_index,
            positions=tuple(position for position, count in zip(positions, counts, strict=True) if count),
            counts=tuple(count for count in counts if count),
        )

    def _counted(self, slots: Sequence[int | None]) -> Counted | None:
        row_index = self._row_index([slot is not None for slot in slots])
        if row_index is None:
            return None
        return Counted(row_index, self._integers([slot for slot in slots if slot is not None]))

    def _row_index(self, members: Sequence[bool]) -> RowIndex | None:
        if not any(members):
            return None
        return self._in_order([i for i, member in enumerate(members) if member], len(members))

    def _in_order(self, indices: Sequence[int], count: int) -> RowIndex:
        return RowIndex(None if list(indices) == list(range(count)) else self._integers(indices))

    def _integers(self, values: Sequence[int]) -> Tensor:
        return to_device(values, torch.int64, self._device)


def temperature_of(parameters: SamplingParameters) -> float:
    """Returns the temperature by which scores are divided, which is never 0."""
    return max(parameters.temperature, _LOWEST_TEMPERATURE)
