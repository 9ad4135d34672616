"""Sampling on CPUs, with one kernel call for all rows of a step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.kernels import structure
from tgi_server.engine.sampling.logprobs import ChosenReport, Sampled, TopReport
from tgi_server.engine.sampling.metadata import is_plain, most_logits, temperature_of, top_logits
from tgi_server.engine.sampling.processors import TokenMask, WatermarkSettings
from tgi_server.engine.sampling.random import as_int64
from tgi_server.engine.sampling.sampler import Sampler, argmax

# Members of SamplingParameters that are passed to the kernel unchanged.
_SAME = (
    *("do_sample", "watermark", "top_k", "top_p", "typical_p", "min_p", "min_tokens"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "count_penalty"),
)


class CpuSampler(Sampler):
    """A sampler whose state and rules are in `kernels/cpu/sampling/`."""

    def __init__(self, max_rows: int, vocab_size: int, watermark: WatermarkSettings | None = None) -> None:
        super().__init__(vocab_size)
        watermark = watermark or WatermarkSettings()
        self._kernel: Any = torch.classes.oatmill.Sampler(
            max_rows, vocab_size, watermark.gamma, watermark.delta, as_int64(watermark.key)
        )
        # By row, for rows that are not plain.
        self._reports: dict[int, ReportParameters] = {}
        self._top_logits: dict[int, int | None] = {}

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
        text = [*prompt_ids, *generated_ids]
        request = structure(
            "SamplingParameters",
            **{name: getattr(parameters, name) for name in _SAME},
            temperature=temperature_of(parameters),
            seed=as_int64(parameters.seed),
            top_n=report.top_n_tokens,
            prompt_length=len(prompt_ids),
            steps=len(generated_ids),
            previous=text[-1] if text else 0,
            biased=list(parameters.logit_bias),
            biases=list(parameters.logit_bias.values()),
            late_tokens=list(parameters.late_tokens),
        )
        self._kernel.add(row, request, text)
        self._reports[row] = report
        self._top_logits[row] = top_logits(parameters, report)

    def move(self, source: int, target: int) -> None:
        self.clear(target)
        if (report := self._reports.pop(source, None)) is not None:
            self._kernel.move(source, target)
            self._reports[target] = report
            self._top_logits[target] = self._top_logits.pop(source)

    def clear(self, row: int) -> None:
        if self._reports.pop(row, None) is not None:
            del self._top_logits[row]
            self._kernel.clear(row)

    @property
    def top_logits(self) -> int | None:
        return most_logits(self._top_logits.values())

    def sample(
        self, logits: Tensor, rows: Sequence[int], mask: TokenMask | None = None, argmax_ids: Tensor | None = None
    ) -> Sampled:
        if not self._reports:
            return Sampled(argmax(logits, mask) if mask is not None or argmax_ids is None else argmax_ids)
        reports = [(i, self._reports[row]) for i, row in enumerate(rows) if row in self._reports]
        counts = {i: report.top_n_tokens for i, report in reports if report.top_n_tokens}
        return self._sample(logits, rows, mask, [i for i, report in reports if report.logprobs], counts)

    def greedy(self, logits: Tensor, reported: Sequence[int] = ()) -> Sampled:
        return self._sample(logits, [-1] * len(logits), None, reported, {}) if reported else Sampled(argmax(logits))

    def _sample(
        self,
        logits: Tensor,
        rows: Sequence[int],
        mask: TokenMask | None,
        reported: Sequence[int],
        counts: dict[int, int],
    ) -> Sampled:
        """reported: positions in `rows` with a reported log-probability. counts: number of top tokens, by position."""
        bits, positions = (None, []) if mask is None else (mask.bits, list(mask.positions))
        ids, logprobs, top, top_logprobs = self._kernel.sample(logits, list(rows), bits, positions, list(reported))
        sampled = Sampled(ids)
        if reported:
            sampled.chosen.append(ChosenReport(reported, logprobs))
        if counts:
            sampled.top.append(TopReport(tuple(counts), tuple(counts.values()), top, top_logprobs))
        return sampled

    def accept(self, token_ids: Tensor, rows: Sequence[int]) -> None:
        if self._reports:
            self._kernel.accept(token_ids, list(rows))
