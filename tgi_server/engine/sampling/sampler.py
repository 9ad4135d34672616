"""Chooses the next token of every sequence of a batch."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.sampling import warpers
from tgi_server.engine.sampling.draw import best, best_logprobs, draw, has_kernels
from tgi_server.engine.sampling.logprobs import chosen_logprobs, top_logprobs
from tgi_server.engine.sampling.penalties import frequency_penalty, presence_penalty, repetition_penalty
from tgi_server.engine.sampling.plan import Drawing, Plan
from tgi_server.engine.sampling.planner import Planner
from tgi_server.engine.sampling.random import uniform
from tgi_server.engine.sampling.row import Row, counts_generated, counts_sequence, is_greedy, is_plain
from tgi_server.engine.sampling.sampled import ChosenReport, Sampled, TopReport
from tgi_server.engine.sampling.token_counts import TokenCounts
from tgi_server.engine.sampling.token_mask import TokenMask, forbid
from tgi_server.engine.sampling.watermark import WatermarkSettings, raise_green


class Sampler:
    """Sampling state of a batch: one row for each sequence.

    A step is `sample`, then `accept` with the tokens that were really taken. Neither waits for the device. What a
    row does is a function of its request and of its tokens alone, whatever the other rows are.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, watermark: WatermarkSettings | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._watermark = watermark or WatermarkSettings()
        self._rows: dict[int, Row] = {}  # those that are not plain: a batch of plain rows has none
        self._kernels = False  # whether rows that are only reported have a kernel, and need no plan
        self._sequences = TokenCounts(vocab_size, device)
        self._generated = TokenCounts(vocab_size, device)
        self._steps = torch.zeros(max_rows, dtype=torch.int64, device=device)  # tokens generated
        self._previous = torch.zeros(max_rows, dtype=torch.int64, device=device)  # the last token
        self._planner = Planner(vocab_size, device)
        self._plans: tuple[Plan, ...] = ()
        self._planned_rows: tuple[int, ...] | None = None
        self._planned_masks: tuple[int, ...] = ()

    def add(
        self,
        row: int,
        parameters: SamplingParameters,
        report: ReportParameters,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int],
    ) -> None:
        """Gives `row` to a request. generated_ids: what it had generated before a preemption.

        Raises ValueError when the request's bias names a token that the vocabulary does not have.
        """
        unknown = [token for token in parameters.logit_bias if not 0 <= token < self._vocab_size]
        if unknown:
            raise ValueError(f"logit_bias names token {unknown[0]}; the vocabulary ends at {self._vocab_size - 1}")
        self.clear(row)
        if is_plain(parameters, report):
            return
        self._rows[row] = Row(
            parameters,
            report,
            prompt_length=len(prompt_ids),
            sequence_slot=self._sequences.take([*prompt_ids, *generated_ids]) if counts_sequence(parameters) else None,
            generated_slot=self._generated.take(generated_ids) if counts_generated(parameters) else None,
            only_reported=is_greedy(parameters) and not report.top_n_tokens,
        )
        self._steps[row] = len(generated_ids)
        text = generated_ids if len(generated_ids) else prompt_ids
        self._previous[row] = text[-1] if len(text) else 0
        self._planned_rows = None

    def move(self, source: int, target: int) -> None:
        """The request at `source` stands at `target` from now on, and `source` is free."""
        self.clear(target)
        moved = self._rows.pop(source, None)
        if moved is not None:
            self._rows[target] = moved
            self._steps[target] = self._steps[source]
            self._previous[target] = self._previous[source]
            self._planned_rows = None

    def clear(self, row: int) -> None:
        """Frees `row`, whether it was taken or not."""
        cleared = self._rows.pop(row, None)
        if cleared is None:
            return
        if cleared.sequence_slot is not None:
            self._sequences.release(cleared.sequence_slot)
        if cleared.generated_slot is not None:
            self._generated.release(cleared.generated_slot)
        self._planned_rows = None

    @property
    def processes(self) -> bool:
        """Whether a row wants more than the token with the highest logit."""
        return bool(self._rows)

    def sample(self, logits: Tensor, rows: Sequence[int], mask: TokenMask | None = None) -> Sampled:
        """Chooses a token for each of `logits` `[n, vocab]`, in any float type; logits[i] are those of `rows[i]`.

        Changes neither the logits nor the state; see `accept`.
        """
        only_masked = None
        self._use_kernels(has_kernels(logits))
        if mask is not None and self._kernels:
            processed = [self._needs_plan(rows[position]) for position in mask.positions]
            only_masked, mask = mask.part([not each for each in processed]), mask.part(processed)
        reported = [i for i, row in enumerate(rows) if row in self._rows and not self._needs_plan(row)]
        plans = self._plans_for(rows, () if mask is None else mask.positions)
        rest_is_greedy = sum(plan.state_rows.shape[0] for plan in plans) < logits.shape[0]
        sampled = Sampled(best(logits, only_masked) if rest_is_greedy else self._steps.new_empty(logits.shape[0]))
        if reported:
            logprobs = best_logprobs(logits, sampled.token_ids, reported, only_masked)
            sampled.chosen.append(ChosenReport(reported, logprobs))
        for plan in plans:
            taken = plan.processed.take(logits)
            scores = self._process(taken.to(torch.float32, copy=taken is logits), plan, mask)
            scores, chosen = self._choose(scores, plan)
            sampled.token_ids = plan.processed.put(sampled.token_ids, chosen)
            _report(scores, chosen, plan, sampled)
        return sampled

    def accept(self, token_ids: Tensor, rows: Sequence[int], active: Tensor | None = None) -> None:
        """Appends a token to each of `rows`: int64 `[n]` on the device.

        active: bool `[n]`; rows where it is false stay as they are, for draft tokens that may turn out refused.
        """
        for plan in self._plans_for(rows, None):
            taken = plan.processed.take(token_ids)
            amounts = torch.ones_like(taken) if active is None else plan.processed.take(active).to(torch.int64)
            for counted, pool in ((plan.sequence_counts, self._sequences), (plan.generated_counts, self._generated)):
                if counted is not None:
                    pool.record(counted.slots, counted.subset.take(taken), counted.subset.take(amounts))
            if active is not None:
                taken = torch.where(amounts > 0, taken, self._previous[plan.state_rows])
            self._previous.index_copy_(0, plan.state_rows, taken)
            self._steps.index_add_(0, plan.state_rows, amounts)

    def _use_kernels(self, there: bool) -> None:
        if there != self._kernels:
            self._kernels, self._planned_rows = there, None

    def _needs_plan(self, row: int) -> bool:
        entry = self._rows.get(row)
        return entry is not None and not (self._kernels and entry.only_reported)

    def _plans_for(self, rows: Sequence[int], masked_positions: Sequence[int] | None) -> tuple[Plan, ...]:
        """masked_positions: the rows of the logits that have a mask; None: it does not matter."""
        if not self._rows and not masked_positions:
            return ()
        wanted, masked = tuple(rows), None if masked_positions is None else tuple(masked_positions)
        if wanted != self._planned_rows or masked not in (None, self._planned_masks):
            self._planned_rows, self._planned_masks = wanted, masked or ()
            state = {row: entry for row, entry in self._rows.items() if self._needs_plan(row)}
            self._plans = self._planner.plans(wanted, self._planned_masks, state)
        return self._plans

    def _process(self, scores: Tensor, plan: Plan, mask: TokenMask | None) -> Tensor:
        """Masks, watermark, penalties and bias, which concern greedy rows too."""
        if mask is not None and plan.masked is not None:
            scores = plan.masked.put(scores, forbid(plan.masked.take(scores), plan.masks.take(mask.bits)))
        if plan.watermark is not None:
            previous = plan.watermark.take(self._previous[plan.state_rows])
            scores = plan.watermark.put(scores, raise_green(plan.watermark.take(scores), previous, self._watermark))
        if plan.repetition is not None:
            scores = plan.repetition.apply(scores, self._sequences.counts, repetition_penalty)
        if plan.frequency is not None:
            lengths = plan.frequency.rule.subset.take(plan.prompt_lengths + self._steps[plan.state_rows])
            penalise = partial(frequency_penalty, lengths=lengths.unsqueeze(1))
            scores = plan.frequency.apply(scores, self._sequences.counts, penalise)
        if plan.presence is not None:
            scores = plan.presence.apply(scores, self._generated.counts, presence_penalty)
        if plan.bias is not None:
            scores.view(-1).scatter_add_(0, plan.bias.places, plan.bias.values)
        return scores

    def _choose(self, scores: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """The scores after the warpers of the rows that sample, and the ids chosen by them: `[processed]`."""
        drawing = plan.drawing
        if drawing is None:
            return scores, best(scores)
        warped = _warp(drawing.subset.take(scores), drawing)
        steps = drawing.subset.take(self._steps[plan.state_rows])
        chosen = draw(warped, uniform(drawing.seeds, steps))
        if drawing.subset.index is not None:
            chosen = drawing.subset.put(best(scores), chosen)
        return drawing.subset.put(scores, warped), chosen


def _warp(scores: Tensor, drawing: Drawing) -> Tensor:
    """TGI's order, which is that of transformers; `min_p`, which TGI does not have, comes last."""
    if drawing.temperature is not None:
        scores = drawing.temperature.apply(scores, warpers.temperature)
    if drawing.top_k is not None:
        scores = drawing.top_k.apply(scores, partial(warpers.top_k, largest=int(drawing.top_k.largest)))
    if drawing.top_p is not None:
        scores = drawing.top_p.apply(scores, warpers.top_p)
    if drawing.typical_p is not None:
        scores = drawing.typical_p.apply(scores, warpers.typical_p)
    if drawing.min_p is not None:
        scores = drawing.min_p.apply(scores, warpers.min_p)
    return scores


def _report(scores: Tensor, chosen: Tensor, plan: Plan, sampled: Sampled) -> None:
    """Adds what rows asked to know. As in TGI, probabilities are those after all processors and warpers."""
    if (wish := plan.logprobs) is not None:
        logprobs = torch.log_softmax(wish.subset.take(scores), -1)
        sampled.chosen.append(ChosenReport(wish.positions, chosen_logprobs(logprobs, wish.subset.take(chosen))))
    if (wish := plan.top_tokens) is not None:
        logprobs = torch.log_softmax(wish.subset.take(scores), -1)
        sampled.top.append(TopReport(wish.positions, wish.counts, *top_logprobs(logprobs, max(wish.counts))))
