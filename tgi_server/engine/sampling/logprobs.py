"""The tokens of a step and their log-probabilities, on the device and on the host."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from tgi_server.engine.memory import HOST, to_device, use_device

# Maximum number of tokens that are reported in addition to the n most likely, because they tie with the last of these.
ROOM_FOR_TIES = 16
_CHUNK_ELEMENTS = 2**25


def prompt_logprobs(logits: Tensor, next_ids: Tensor, most: int = 0) -> tuple[Tensor, list[list[tuple[int, float]]]]:
    """Returns the log-probability of each prompt token given those before it, and the `most` likeliest alternatives.

    logits: `[tokens, vocab]` in any float type. next_ids: int64 `[tokens]`, the token after each position. The first
    result is float32 `[tokens]`, the second a list of (id, log-probability) per token, best first; empty if `most` is
    0. Works in pieces, so that a long prompt needs no float32 copy of all its logits.
    """
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    pieces: list[Tensor] = []
    top: list[list[tuple[int, float]]] = []
    for part, ids in zip(logits.split(rows), next_ids.split(rows), strict=True):
        logprobs = torch.log_softmax(part, -1, dtype=torch.float32)
        pieces.append(chosen_logprobs(logprobs, ids))
        if most:
            best = logprobs.topk(min(most, logprobs.shape[1]))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            top.extend(list(zip(*pair, strict=True)) for pair in pairs)
    return torch.cat(pieces), top


def chosen_logprobs(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the log-probability of each row's token: `[rows, vocab]`, `[rows]` -> `[rows]`."""
    return logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)


def top_logprobs(logprobs: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns ids and log-probabilities of the `most` likeliest tokens and some more, best first: `[rows, width]`.

    The additional tokens are for ties with a row's n-th, which are counted on the host only; see `keep_top`.
    """
    top = logprobs.topk(min(most + ROOM_FOR_TIES, logprobs.shape[1]))
    return top.indices, top.values


def keep_top(ids: list[int], logprobs: list[float], n: int) -> list[tuple[int, float]]:
    """Returns the first n of one row of `top_logprobs`, and further ones that are equal to the n-th, as TGI does.

    Tokens with a log-probability of minus infinity are left out.
    """
    last = logprobs[min(n, len(logprobs)) - 1]
    kept = [
        (token, logprob)
        for token, logprob in zip(ids, logprobs, strict=True)
        if logprob >= last and logprob != float("-inf")
    ]
    return sorted(kept, key=lambda pair: (-pair[1], pair[0]))


@dataclass(frozen=True, slots=True)
class ChosenReport:
    """Log-probabilities, float32 `[k]`, of the chosen tokens. positions: their rows of the logits."""

    positions: Sequence[int]
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class TopReport:
    """The likeliest tokens, `[k, width]`. positions: their rows of the logits. counts: how many to report of each."""

    positions: Sequence[int]
    counts: Sequence[int]
    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class ScoredReport:
    """Log-probabilities, float32 `[k]`, of the tokens `ids` as the next token of one row of the logits (`position`)."""

    position: int
    ids: Sequence[int]
    logprobs: Tensor


def scored_logprobs(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Returns the log-probabilities of the tokens `ids`, float32 `[k]`. logits: one row, `[vocab]`.

    Rows are computed one by one, so that the bits of a row do not depend on the others.
    """
    return torch.log_softmax(logits, -1, dtype=torch.float32)[to_device(ids, torch.int64, logits.device)]


@dataclass(slots=True)
class Sampled:
    """The sampled tokens of a step, int64 `[n]` on the device, and the reports that requests asked for.

    The caller may replace `token_ids` before they are accepted or copied.
    """

    token_ids: Tensor
    chosen: list[ChosenReport] = field(default_factory=list)
    top: list[TopReport] = field(default_factory=list)
    scored: list[ScoredReport] = field(default_factory=list)

    def start_copy(self) -> "PendingTokens":
        """Starts one copy of everything to the host, and returns at once."""
        parts = [report.logprobs for report in self.chosen]
        parts.extend(part.flatten() for report in self.top for part in (report.ids, report.logprobs))
        parts.extend(report.logprobs for report in self.scored)
        packed = self.token_ids
        if parts:
            # float64 represents both token ids and float32 numbers exactly.
            packed = torch.cat([part.to(torch.float64) for part in (packed, *parts)])
        if packed.device == HOST:
            return PendingTokens(self, packed, packed.device, None)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps instead of spinning
        done.record()
        return PendingTokens(self, host, packed.device, done)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a step on the host, one id for each row of the logits.

    logprobs: log-probabilities of the chosen tokens, by row. top_tokens: lists of (id, log-probability), by row. Both
    have only the rows that asked for them.
    """

    ids: list[int]
    logprobs: dict[int, float]
    top_tokens: dict[int, list[tuple[int, float]]]


class PendingTokens:
    """The tokens of a step while they are copied to the host."""

    def __init__(self, sampled: Sampled, host: Tensor, device: torch.device, done: torch.cuda.Event | None) -> None:
        """host: the target of the copy from `device`. done: event at the end of the copy; None: it has ended."""
        self._sampled = sampled
        self._host = host
        self._device = device
        self._done = done

    def synchronize(self) -> None:
        """Waits for the copy, but not for later work of the device. Thread-safe."""
        if self._done is not None:
            use_device(self._device)
            self._done.synchronize()

    def wait(self) -> Tokens:
        """Waits for the copy, and returns the tokens."""
        self.synchronize()
        values = iter(self._host.tolist())
        tokens = Tokens([int(value) for value in islice(values, self._sampled.token_ids.shape[0])], {}, {})
        for report in self._sampled.chosen:
            tokens.logprobs.update(zip(report.positions, islice(values, len(report.positions)), strict=True))
        for top in self._sampled.top:
            ids, logprobs = _matrix(values, top.ids), _matrix(values, top.logprobs)
            for row, position in enumerate(top.positions):
                tokens.top_tokens[position] = keep_top([int(i) for i in ids[row]], logprobs[row], top.counts[row])
        for scored in self._sampled.scored:
            tokens.top_tokens[scored.position] = list(zip(scored.ids, islice(values, len(scored.ids)), strict=True))
        return tokens


def _matrix(values: Iterator[float], like: Tensor) -> list[list[float]]:
    rows, width = like.shape
    return [list(islice(values, width)) for _ in range(rows)]
