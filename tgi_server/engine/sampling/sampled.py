"""What one step chose, on the device and on the host."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from tgi_server.engine.sampling.logprobs import keep_top


@dataclass(frozen=True, slots=True)
class ChosenReport:
    """logprobs: float32 `[k]`, of the tokens chosen at `positions`, which are rows of the logits."""

    positions: Sequence[int]
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class TopReport:
    """ids and logprobs: `[k, width]`, from which the row at positions[i] wants the best counts[i]."""

    positions: Sequence[int]
    counts: Sequence[int]
    ids: Tensor
    logprobs: Tensor


@dataclass(slots=True)
class Sampled:
    """token_ids: int64 `[n]` on the device; they may be replaced before they are accepted or copied."""

    token_ids: Tensor
    chosen: list[ChosenReport] = field(default_factory=list)
    top: list[TopReport] = field(default_factory=list)

    def start_copy(self) -> "PendingTokens":
        """Starts one copy of everything to the host, and returns at once."""
        parts = [report.logprobs for report in self.chosen]
        parts.extend(part.flatten() for report in self.top for part in (report.ids, report.logprobs))
        packed = self.token_ids
        if parts:
            # float64 holds token ids and float32 numbers alike without loss.
            packed = torch.cat([part.to(torch.float64) for part in (packed, *parts)])
        if packed.device.type != "cuda":
            return PendingTokens(self, packed, None)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return PendingTokens(self, host, done)

    def to_host(self) -> "Tokens":
        """Copies everything to the host and waits for it."""
        return self.start_copy().wait()


@dataclass(frozen=True, slots=True)
class Tokens:
    """ids: one for each row of the logits. logprobs and top_tokens (id, logprob): by row, where asked for."""

    ids: list[int]
    logprobs: dict[int, float]
    top_tokens: dict[int, list[tuple[int, float]]]


class PendingTokens:
    """A copy under way."""

    def __init__(self, sampled: Sampled, host: Tensor, done: torch.cuda.Event | None) -> None:
        self._sampled = sampled
        self._host = host
        self._done = done

    def synchronize(self) -> None:
        """Waits for the copy, not for what the device was given to do after it. May be called in any thread."""
        if self._done is not None:
            self._done.synchronize()

    def wait(self) -> Tokens:
        """Waits as `synchronize` does."""
        self.synchronize()
        values = iter(self._host.tolist())
        tokens = Tokens([int(value) for value in islice(values, self._sampled.token_ids.shape[0])], {}, {})
        for report in self._sampled.chosen:
            tokens.logprobs.update(zip(report.positions, islice(values, len(report.positions)), strict=True))
        for top in self._sampled.top:
            ids, logprobs = _matrix(values, top.ids), _matrix(values, top.logprobs)
            for row, position in enumerate(top.positions):
                tokens.top_tokens[position] = keep_top([int(i) for i in ids[row]], logprobs[row], top.counts[row])
        return tokens


def _matrix(values: Iterator[float], like: Tensor) -> list[list[float]]:
    rows, width = like.shape
    return [list(islice(values, width)) for _ in range(rows)]
