"""Makes plans of what the rows ask for."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tgi_server.engine.memory import to_device
from tgi_server.engine.sampling.plan import Bias, Counted, Drawing, Penalty, Plan, Report, Rule, Subset
from tgi_server.engine.sampling.random import as_int64
from tgi_server.engine.sampling.row import PLAIN, Row

# Bounds the memory of the steps in between, which are of 8 bytes per element.
_ELEMENTS_AT_ONCE = 2**24
# So few that they stay in a core's cache: three times as fast as all rows at once.
_CPU_ELEMENTS_AT_ONCE = 2**17

# A lower one would make scores infinite; this one is greedy already.
_LOWEST_TEMPERATURE = 1e-20


class Planner:
    """Loops over rows once, on the host, and puts what the steps need on the device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        elements = _ELEMENTS_AT_ONCE if device.type == "cuda" else _CPU_ELEMENTS_AT_ONCE * torch.get_num_threads()
        self._rows_at_once = max(1, elements // vocab_size)

    def plans(self, rows: Sequence[int], masked_positions: Sequence[int], state: Mapping[int, Row]) -> tuple[Plan, ...]:
        """What to do with the logits of `rows`, piece by piece; nothing when an argmax will do.

        masked_positions: rows of the logits that have a mask. state: the rows that are not plain.
        """
        masks = {position: mask for mask, position in enumerate(masked_positions)}
        positions = [i for i, row in enumerate(rows) if row in state or i in masks]
        size = self._rows_at_once
        pieces = [positions[i : i + size] for i in range(0, len(positions), size)]
        return tuple(self._plan(piece, rows, masks, state) for piece in pieces)

    def _plan(
        self, positions: Sequence[int], rows: Sequence[int], masks: Mapping[int, int], state: Mapping[int, Row]
    ) -> Plan:
        entries = [state.get(rows[i], PLAIN) for i in positions]
        parameters = [entry.parameters for entry in entries]
        sequence_slots = [entry.sequence_slot for entry in entries]
        generated_slots = [entry.generated_slot for entry in entries]
        return Plan(
            processed=self._in_order(positions, len(rows)),
            state_rows=self._integers([rows[i] for i in positions]),
            prompt_lengths=self._integers([entry.prompt_length for entry in entries]),
            masked=self._subset([i in masks for i in positions]),
            masks=self._in_order([masks[i] for i in positions if i in masks], len(masks)),
            watermark=self._subset([p.watermark for p in parameters]),
            repetition=self._penalty([p.repetition_penalty for p in parameters], 1.0, sequence_slots),
            frequency=self._penalty([p.frequency_penalty for p in parameters], 0.0, sequence_slots),
            presence=self._penalty([p.presence_penalty for p in parameters], 0.0, generated_slots),
            bias=self._bias([p.logit_bias for p in parameters]),
            drawing=self._drawing(entries),
            logprobs=self._report([int(entry.report.logprobs) for entry in entries], positions),
            top_tokens=self._report([entry.report.top_n_tokens for entry in entries], positions),
            sequence_counts=self._counted(sequence_slots),
            generated_counts=self._counted(generated_slots),
        )

    def _drawing(self, entries: Sequence[Row]) -> Drawing | None:
        subset = self._subset([entry.parameters.do_sample for entry in entries])
        if subset is None:
            return None
        drawn = [entry.parameters for entry in entries if entry.parameters.do_sample]
        top_k = [min(p.top_k, self._vocab_size) for p in drawn]
        return Drawing(
            subset=subset,
            seeds=self._integers([as_int64(p.seed) for p in drawn]),
            temperature=self._rule([max(p.temperature, _LOWEST_TEMPERATURE) for p in drawn], 1.0, torch.float32),
            top_k=self._rule(top_k, 0, torch.int64),
            top_p=self._rule([p.top_p for p in drawn], 1.0, torch.float64),
            typical_p=self._rule([p.typical_p for p in drawn], 1.0, torch.float64),
            min_p=self._rule([p.min_p for p in drawn], 0.0, torch.float32),
        )

    def _penalty(self, values: Sequence[float], off: float, slots: Sequence[int | None]) -> Penalty | None:
        rule = self._rule(values, off, torch.float32)
        if rule is None:
            return None
        concerned = [slot for slot, value in zip(slots, values, strict=True) if slot is not None and value != off]
        return Penalty(rule, self._integers(concerned))

    def _rule(self, values: Sequence[float], off: float, dtype: torch.dtype) -> Rule | None:
        subset = self._subset([value != off for value in values])
        if subset is None:
            return None
        concerned = [value for value in values if value != off]
        return Rule(subset, to_device(concerned, dtype, self._device).unsqueeze(1), max(concerned))

    def _bias(self, biases: Sequence[Mapping[int, float]]) -> Bias | None:
        entries = [(row * self._vocab_size + i, value) for row, bias in enumerate(biases) for i, value in bias.items()]
        if not entries:
            return None
        places, values = zip(*entries, strict=True)
        return Bias(self._integers(places), to_device(values, torch.float32, self._device))

    def _report(self, counts: Sequence[int], positions: Sequence[int]) -> Report | None:
        subset = self._subset([count > 0 for count in counts])
        if subset is None:
            return None
        return Report(
            subset,
            positions=tuple(position for position, count in zip(positions, counts, strict=True) if count),
            counts=tuple(count for count in counts if count),
        )

    def _counted(self, slots: Sequence[int | None]) -> Counted | None:
        subset = self._subset([slot is not None for slot in slots])
        if subset is None:
            return None
        return Counted(subset, self._integers([slot for slot in slots if slot is not None]))

    def _subset(self, members: Sequence[bool]) -> Subset | None:
        if not any(members):
            return None
        return self._in_order([i for i, member in enumerate(members) if member], len(members))

    def _in_order(self, indices: Sequence[int], count: int) -> Subset:
        return Subset(None if list(indices) == list(range(count)) else self._integers(indices))

    def _integers(self, values: Sequence[int]) -> Tensor:
        return to_device(values, torch.int64, self._device)
