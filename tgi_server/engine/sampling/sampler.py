"""Chooses the next token of every sequence of a batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.kernels.triton import variants
from tgi_server.engine.memory import HOST
from tgi_server.engine.sampling.logprobs import Sampled
from tgi_server.engine.sampling.processors import TokenMask

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Sampler(ABC):
    """The sampling state of a batch: one row for each sequence.

    A step is `sample`, then `accept` with the tokens that are kept. A row's tokens depend only on its request and its
    tokens so far, not on other rows.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @abstractmethod
    def add(
        self,
        row: int,
        parameters: SamplingParameters,
        report: ReportParameters,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int],
    ) -> None:
        """Gives `row` to a request. generated_ids: tokens that it generated before a preemption.

        Raises ValueError if a token of the request's bias or late tokens is not in the vocabulary.
        """

    @abstractmethod
    def move(self, source: int, target: int) -> None:
        """Moves the request at `source` to `target`, and frees `source`."""

    @abstractmethod
    def clear(self, row: int) -> None:
        """Frees `row`, if it is in use."""

    @property
    @abstractmethod
    def top_logits(self) -> int | None:
        """The largest number of top logits that a row needs; None: some row needs all. See `metadata.top_logits`."""

    @abstractmethod
    def sample(
        self, logits: Tensor, rows: Sequence[int], mask: TokenMask | None = None, argmax_ids: Tensor | None = None
    ) -> Sampled:
        """Chooses a token for each row of `logits`, `[n, vocab]` in any float type; logits[i] belongs to `rows[i]`.

        mask: allowed tokens of some rows, whose logits may be overwritten. argmax_ids: the argmax of each row without
        the mask, int64 `[n]`, if it is known already; the result may be this tensor. Does not change the state; see
        `accept`.
        """

    @abstractmethod
    def greedy(self, logits: Tensor, reported: Sequence[int] = ()) -> Sampled:
        """Chooses the argmax of each row of `logits`, `[n, vocab]`, regardless of any requests.

        reported: indices among the n of rows whose log-probability is reported.
        """

    @abstractmethod
    def accept(self, token_ids: Tensor, rows: Sequence[int]) -> None:
        """Records a token for each of `rows`. token_ids: int64 `[n]` on the device."""

    def _check(self, parameters: SamplingParameters) -> None:
        for name, tokens in (("logit_bias", parameters.logit_bias), ("late_tokens", parameters.late_tokens)):
            unknown = [token for token in tokens if not 0 <= token < self._vocab_size]
            if unknown:
                raise ValueError(f"{name} has token {unknown[0]}; the vocabulary ends at {self._vocab_size - 1}")


def argmax(scores: Tensor, mask: TokenMask | None = None) -> Tensor:
    """Returns the argmax of each row, int64 `[rows]`, the first of equals. scores: `[rows, tokens]` in any float type.

    mask: allowed tokens; for scores on CPUs with kernels only.
    """
    if scores.device == HOST and scores.dtype in _KERNEL_DTYPES and load_kernels():
        if mask is None:
            return torch.ops.oatmill.argmax(scores)
        return torch.ops.oatmill.argmax(scores, mask.bits, mask.positions)
    assert mask is None
    if scores.device != HOST and "argmax" in variants():
        from tgi_server.engine.kernels.triton.argmax import argmax as argmax_in_parts

        return argmax_in_parts(scores)
    # The same as torch.argmax, which on CPUs converts bfloat16 element by element and takes six times as long.
    return scores.max(-1).indices
