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

    A step is `sample`, then `accept` with the tokens that were really taken. A row's tokens are a function of its
    request and of its tokens so far alone, whatever the other rows are.
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
        """Gives `row` to a request. generated_ids: what it had generated before a preemption.

        Raises ValueError when the request's bias or late tokens name one that the vocabulary does not have.
        """

    @abstractmethod
    def move(self, source: int, target: int) -> None:
        """Moves the request at `source` to `target`, and frees `source`."""

    @abstractmethod
    def clear(self, row: int) -> None:
        """Frees `row`; a row that is free already stays so."""

    @property
    @abstractmethod
    def top_logits(self) -> int | None:
        """Returns how many of their largest logits the rows need at most, as the function of that name; None: all."""

    @abstractmethod
    def sample(
        self, logits: Tensor, rows: Sequence[int], mask: TokenMask | None = None, argmax_ids: Tensor | None = None
    ) -> Sampled:
        """Chooses a token for each of `logits` `[n, vocab]`, in any float type; logits[i] are those of `rows[i]`.

        mask: of some of the rows; their logits may be overwritten. argmax_ids: the tokens of the highest logits,
        without a mask, int64 `[n]`, where they are known; where no row wants anything else, they are the ones in the
        result. Changes the state in no way; see `accept`.
        """

    @abstractmethod
    def greedy(self, logits: Tensor, reported: Sequence[int] = ()) -> Sampled:
        """Chooses the tokens with the highest logits `[n, vocab]`, whichever rows they are of.

        reported: those of the n whose log-probability is reported, too.
        """

    @abstractmethod
    def accept(self, token_ids: Tensor, rows: Sequence[int]) -> None:
        """Appends a token to each of `rows`: int64 `[n]` on the device."""

    def _check(self, parameters: SamplingParameters) -> None:
        for name, tokens in (("logit_bias", parameters.logit_bias), ("late_tokens", parameters.late_tokens)):
            unknown = [token for token in tokens if not 0 <= token < self._vocab_size]
            if unknown:
                raise ValueError(f"{name} has token {unknown[0]}; the vocabulary ends at {self._vocab_size - 1}")


def argmax(scores: Tensor, mask: TokenMask | None = None) -> Tensor:
    """Returns the argmax `[rows]` of `[rows, tokens]` in any float type, the first of equals.

    mask: for scores that have kernels.
    """
    if scores.device == HOST and scores.dtype in _KERNEL_DTYPES and load_kernels():
        if mask is None:
            return torch.ops.oatmill.argmax(scores)
        return torch.ops.oatmill.argmax(scores, mask.bits, mask.positions)
    assert mask is None
    if scores.device != HOST and "argmax" in variants():
        from tgi_server.engine.kernels.triton.argmax import argmax as argmax_in_parts

        return argmax_in_parts(scores)
    # What argmax gives; on a CPU argmax converts bfloat16 element by element, and takes six times as long.
    return scores.max(-1).indices
