"""Sampling with torch's operations on any device; on GPUs also with a fused kernel for rows that sample."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine import proofs
from tgi_server.engine.memory import to_device
from tgi_server.engine.sampling import warpers
from tgi_server.engine.sampling.logprobs import ChosenReport, Sampled, TopReport, chosen_logprobs, top_logprobs
from tgi_server.engine.sampling.metadata import (
    MetadataBuilder,
    Row,
    SamplingMetadata,
    SamplingTensors,
    counts_generated,
    counts_sequence,
    is_plain,
    most_logits,
    top_logits,
)
from tgi_server.engine.sampling.processors import (
    TokenCounts,
    TokenMask,
    WatermarkSettings,
    count_penalty,
    frequency_penalty,
    presence_penalty,
    raise_green,
    repetition_penalty,
)
from tgi_server.engine.sampling.random import draw, uniform
from tgi_server.engine.sampling.sampler import Sampler, argmax

# Share of the rows for which the kernel has to choose the same token as plain torch.
_LEAST_EQUAL = 0.9


class TorchSampler(Sampler):
    """A sampler that applies each rule with a few operations to all of the rule's rows at once.

    Neither `sample` nor `accept` waits for the device.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        watermark: WatermarkSettings | None = None,
        *,
        row_kernel: bool = False,
    ) -> None:
        """row_kernel: True uses the fused kernel for GPUs for rows that sample."""
        super().__init__(vocab_size)
        self._device = device
        self._watermark = watermark or WatermarkSettings()
        self._rows: dict[int, Row] = {}  # only rows that are not plain
        self._sequences = TokenCounts(vocab_size, device)
        self._generated = TokenCounts(vocab_size, device)
        self._steps = torch.zeros(max_rows, dtype=torch.int64, device=device)  # tokens generated
        self._previous = torch.zeros(max_rows, dtype=torch.int64, device=device)  # the last token
        self._builder = MetadataBuilder(vocab_size, device, row_kernel=row_kernel)
        self._metadata: tuple[SamplingMetadata, ...] = ()
        self._described_rows: tuple[int, ...] | None = None  # the rows of the metadata

    def add(
        self,
        row: int,
        parameters: SamplingParameters,
        report: ReportParameters,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int],
    ) -> None:
        self._check(parameters)
        self.clear(row)
        if is_plain(parameters, report):
            return
        self._rows[row] = Row(
            parameters,
            report,
            prompt_length=len(prompt_ids),
            sequence_slot=self._sequences.take([*prompt_ids, *generated_ids]) if counts_sequence(parameters) else None,
            generated_slot=self._generated.take(generated_ids) if counts_generated(parameters) else None,
        )
        self._steps[row].fill_(len(generated_ids))  # an assignment would copy from the host and wait for the device
        text = generated_ids if len(generated_ids) else prompt_ids
        self._previous[row].fill_(text[-1] if len(text) else 0)
        self._described_rows = None

    def move(self, source: int, target: int) -> None:
        self.clear(target)
        moved = self._rows.pop(source, None)
        if moved is not None:
            self._rows[target] = moved
            self._steps[target] = self._steps[source]
            self._previous[target] = self._previous[source]
            self._described_rows = None

    def clear(self, row: int) -> None:
        cleared = self._rows.pop(row, None)
        if cleared is None:
            return
        if cleared.sequence_slot is not None:
            self._sequences.release(cleared.sequence_slot)
        if cleared.generated_slot is not None:
            self._generated.release(cleared.generated_slot)
        self._described_rows = None

    @property
    def top_logits(self) -> int | None:
        return most_logits(top_logits(row.parameters, row.report) for row in self._rows.values())

    def sample(
        self, logits: Tensor, rows: Sequence[int], mask: TokenMask | None = None, argmax_ids: Tensor | None = None
    ) -> Sampled:
        if mask is not None:
            mask.apply(logits)
            argmax_ids = None
        metadata = self._metadata_for(rows)
        processed = sum(piece.state_rows.shape[0] for piece in metadata)
        if processed == logits.shape[0]:
            sampled = Sampled(self._steps.new_empty(logits.shape[0]))
        elif argmax_ids is None:
            sampled = Sampled(argmax(logits))
        else:
            sampled = Sampled(argmax_ids.clone() if processed else argmax_ids)
        for piece in metadata:
            taken = piece.processed.take(logits)
            scores = self._process(taken.to(torch.float32, copy=taken is logits), piece)
            scores, chosen = self._choose(scores, piece)
            sampled.token_ids = piece.processed.put(sampled.token_ids, chosen)
            _report(scores, chosen, piece, sampled)
        return sampled

    def greedy(self, logits: Tensor, reported: Sequence[int] = ()) -> Sampled:
        sampled = Sampled(argmax(logits))
        if reported:
            rows = to_device(reported, torch.int64, logits.device)
            logprobs = torch.log_softmax(logits.index_select(0, rows).float(), -1)
            chosen = chosen_logprobs(logprobs, sampled.token_ids.index_select(0, rows))
            sampled.chosen.append(ChosenReport(reported, chosen))
        return sampled

    def accept(self, token_ids: Tensor, rows: Sequence[int]) -> None:
        for metadata in self._metadata_for(rows):
            taken = metadata.processed.take(token_ids)
            amounts = torch.ones_like(taken)
            for counted, pool in (
                (metadata.sequence_counts, self._sequences),
                (metadata.generated_counts, self._generated),
            ):
                if counted is not None:
                    pool.record(counted.slots, counted.row_index.take(taken), counted.row_index.take(amounts))
            self._previous.index_copy_(0, metadata.state_rows, taken)
            self._steps.index_add_(0, metadata.state_rows, amounts)

    def _metadata_for(self, rows: Sequence[int]) -> tuple[SamplingMetadata, ...]:
        if not self._rows:
            return ()
        wanted = tuple(rows)
        if wanted != self._described_rows:
            self._described_rows = wanted
            self._metadata = self._builder.build(wanted, self._rows)
        return self._metadata

    def _process(self, scores: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Applies watermark, penalties, bias and `min_tokens`, also to greedy rows. Replaces NaN by minus infinity."""
        if metadata.watermark is not None:
            previous = metadata.watermark.take(self._previous[metadata.state_rows])
            scores = metadata.watermark.put(
                scores, raise_green(metadata.watermark.take(scores), previous, self._watermark)
            )
        if metadata.repetition is not None:
            scores = metadata.repetition.apply(scores, self._sequences.counts, repetition_penalty)
        if metadata.frequency is not None:
            lengths = metadata.frequency.rule.row_index.take(metadata.prompt_lengths + self._steps[metadata.state_rows])
            penalise = partial(frequency_penalty, lengths=lengths.unsqueeze(1))
            scores = metadata.frequency.apply(scores, self._sequences.counts, penalise)
        if metadata.presence is not None:
            scores = metadata.presence.apply(scores, self._generated.counts, presence_penalty)
        if metadata.count is not None:
            scores = metadata.count.apply(scores, self._generated.counts, count_penalty)
        if metadata.bias is not None:
            scores.view(-1).scatter_add_(0, metadata.bias.places, metadata.bias.values)
        if (min_tokens_ban := metadata.min_tokens_ban) is not None:
            generated = self._steps[metadata.state_rows].index_select(0, min_tokens_ban.rows)
            scores.view(-1).scatter_add_(
                0, min_tokens_ban.places, torch.where(generated < min_tokens_ban.least, -torch.inf, 0.0)
            )
        return scores.nan_to_num_(-torch.inf, torch.finfo(scores.dtype).max, -torch.inf)

    def _choose(self, scores: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor]:
        """Returns the scores, after the warpers for rows that sample, and the chosen ids, `[processed]`."""
        sampling = metadata.sampling
        if sampling is None:
            return scores, argmax(scores)
        steps = sampling.row_index.take(self._steps[metadata.state_rows])
        reports = metadata.logprobs is not None or metadata.top_tokens is not None
        warped, chosen = _draw(sampling.row_index.take(scores), sampling, steps, reports=reports)
        if sampling.row_index.index is not None:
            chosen = sampling.row_index.put(argmax(scores), chosen)
        return sampling.row_index.put(scores, warped), chosen


def _draw(scores: Tensor, sampling: SamplingTensors, steps: Tensor, *, reports: bool) -> tuple[Tensor, Tensor]:
    """Returns the scores after the warpers, and tokens drawn from them.

    steps: number of generated tokens, int64 `[k]`. reports: False if the caller does not need the scores, which may
    then be returned unchanged.
    """
    if (settings := sampling.fused) is not None:
        from tgi_server.engine.kernels.triton.sampling import choose

        scores = scores.contiguous()
        warped = torch.empty_like(scores) if reports else None
        chosen = choose(scores, settings.numbers, settings.top_k, sampling.seeds, steps, warped)
        return scores if warped is None else warped, chosen
    warped = _warp(scores, sampling)
    return warped, draw(warped, uniform(sampling.seeds, steps))


def _warp(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    """Applies the warpers in the order of TGI and transformers; `min_p`, which TGI does not have, comes last."""
    if sampling.temperature is not None:
        scores = sampling.temperature.apply(scores, warpers.temperature)
    if sampling.top_k is not None:
        scores = sampling.top_k.apply(scores, partial(warpers.top_k, largest=int(sampling.top_k.largest)))
    if sampling.top_p is not None:
        scores = sampling.top_p.apply(scores, warpers.top_p)
    if sampling.typical_p is not None:
        scores = sampling.typical_p.apply(scores, warpers.typical_p)
    if sampling.min_p is not None:
        scores = sampling.min_p.apply(scores, warpers.min_p)
    return scores


def _report(scores: Tensor, chosen: Tensor, metadata: SamplingMetadata, sampled: Sampled) -> None:
    """Adds the requested log-probabilities to `sampled`. As in TGI, they are those after all processors and warpers."""
    if (wanted := metadata.logprobs) is not None:
        logprobs = torch.log_softmax(wanted.row_index.take(scores), -1)
        sampled.chosen.append(ChosenReport(wanted.positions, chosen_logprobs(logprobs, wanted.row_index.take(chosen))))
    if (wanted := metadata.top_tokens) is not None:
        logprobs = torch.log_softmax(wanted.row_index.take(scores), -1)
        sampled.top.append(TopReport(wanted.positions, wanted.counts, *top_logprobs(logprobs, max(wanted.counts))))


def row_kernel_fault(new: Callable[..., TorchSampler], logits: Tensor) -> str:
    """Compares the fused kernel with plain torch. Returns why it must not be used; empty if it may be used.

    new: creates a sampler for as many rows as the logits have. The kernel's exponential may differ in the last bit, so
    a few tokens may differ; a wrong kernel chooses other tokens in most rows.
    """

    def fault() -> str:
        tokens: list[Tensor] = []
        # Compiles the kernel's variants, with and without reports, so that no request has to wait for that.
        for row_kernel, logprobs in ((False, False), (True, False), (True, True)):
            sampler, report = new(row_kernel=row_kernel), ReportParameters(logprobs=logprobs)
            for row in range(len(logits)):
                parameters = SamplingParameters(
                    do_sample=True, temperature=0.8, top_k=40 * (row % 3), top_p=0.95, min_p=0.001, seed=row
                )
                sampler.add(row, parameters, report, [0], [])
            tokens.append(sampler.sample(logits, range(len(logits))).token_ids)
            sampler.sample(logits[:1], range(1))  # compiles the variant for few rows
        same = min(share_equal(tokens[0], token) for token in tokens[1:])
        return "" if same >= _LEAST_EQUAL else f"the kernel chooses other tokens in {1 - same:.0%} of all rows"

    return proofs.failure_of("the kernel", fault) or ""


def share_equal(left: Tensor, right: Tensor) -> float:
    """Returns the share of the elements that are equal."""
    return float((left == right).double().mean())
