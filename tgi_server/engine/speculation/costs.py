"""The time that steps take, by the tokens that they compute."""

import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from tgi_server.contract import StoppingParameters
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.runners.base import CacheCapacity, PromptChunk, Runner
from tgi_server.engine.sequence import RunningSequence

# Tokens of the steps that are measured.
_MEASURED_TOKENS = (1, 2, 4, 8, 16, 32, 64)
# Steps are measured in rounds, so that a busy moment spoils no result for good. Measuring ends after _QUIET_ROUNDS
# rounds in which no step was _MUCH_FASTER times as fast as before, or after _LEAST_ROUNDS rounds and _SECONDS.
_QUIET_ROUNDS = 2
_MUCH_FASTER = 1.2
_LEAST_ROUNDS = 3
_SECONDS = 2.0


class StepCosts:
    """Seconds of a step, measured for some numbers of tokens, and interpolated or extrapolated linearly for others.

    On a machine with bandwidth to spare, eight tokens take hardly longer than one. Sixty-four do.
    """

    def __init__(self, without_drafts: Mapping[int, float], with_drafts: Mapping[int, float]) -> None:
        """Both: seconds by the tokens of a step; they differ where a step with drafts runs another way.

        A step without drafts has a token of each sequence that decodes.
        """
        self.without_drafts = Line(without_drafts)
        self.with_drafts = Line(with_drafts)

    def __str__(self) -> str:
        """Returns the milliseconds, for people."""
        return f"{self.without_drafts} ms; with drafts: {self.with_drafts} ms"

    def least_chance(self, rows: int, expected: float, most: int) -> float:
        """Returns a lower bound: drafted tokens with a smaller probability to be right are never worth their time.

        rows, expected: see `worth`. most: maximum number of drafted tokens of all sequences together.
        """
        if not most:
            return 1.0
        longer = expected / self.without_drafts(rows)
        # The bound is a quotient of two straight lines between measured points, so it is lowest at one of these.
        tokens = {rows + 1, rows + most, *(count for count in self.with_drafts.tokens if rows < count < rows + most)}
        return min((longer * self.with_drafts(count) - expected) / (count - rows) for count in tokens)

    def worth(
        self,
        lengths: Sequence[int],
        chances: Sequence[float],
        rows: int,
        expected: float,
        drafting: Callable[[int], float] = lambda tokens: 0.0,
    ) -> list[int]:
        """Returns how many tokens of each draft to check to get the most tokens per second.

        lengths: tokens of each draft. chances: for each draft, the probability that a token is right if those before it
        are. rows: number of other tokens that the step computes. expected: number of other tokens that it yields.
        drafting: returns the seconds for making drafts, given the length of the longest.
        """
        gains = sorted(
            (
                (chance**place, draft, place)
                for draft, chance in enumerate(chances)
                for place in range(1, lengths[draft] + 1)
            ),
            reverse=True,
        )
        fastest, best, longest = expected / self.without_drafts(rows), 0, 0
        for count, (gain, _, place) in enumerate(gains, start=1):
            expected += gain
            longest = max(longest, place)
            speed = expected / (self.with_drafts(rows + count) + drafting(longest))
            if speed > fastest:
                fastest, best = speed, count
        worth = [0] * len(lengths)
        for _, draft, _ in gains[:best]:
            worth[draft] += 1
        return worth


class Line:
    """A non-decreasing, piecewise linear function through some points. tokens: the points' tokens, in order."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self.tokens = sorted(points)
        # A smaller step whose measurement was delayed must not count as slower than a larger one.
        falling = accumulate((points[tokens] for tokens in reversed(self.tokens)), min)
        self._seconds = list(falling)[::-1]

    def __str__(self) -> str:
        return ", ".join(f"{1000 * self(tokens):.3g} ({tokens})" for tokens in self.tokens)

    def __call__(self, tokens: int) -> float:
        if len(self.tokens) == 1:
            return self._seconds[0]
        place = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        low, high = self.tokens[place - 1], self.tokens[place]
        slope = (self._seconds[place] - self._seconds[place - 1]) / (high - low)
        return self._seconds[place - 1] + slope * (tokens - low)


def measure_costs(runner: Runner, capacity: CacheCapacity, group: ShardGroup | None) -> StepCosts | None:
    """Measures steps at the warm-up, in a cache without sequences. All shards use the first shard's measurements.

    Returns None if a sequence has no room for the tokens of the smallest step with drafts.
    """
    start = 1 + 2 * len(_MEASURED_TOKENS)  # the passes of a round move rows ahead; drafts begin after that
    most = min(start + _MEASURED_TOKENS[-1], capacity.max_total_tokens)
    blocks = list(range(1, capacity.num_blocks + 1))[: -(-most // capacity.block_size)]
    room = min(len(blocks) * capacity.block_size, most) - start
    rows = [count for count in _MEASURED_TOKENS if count <= capacity.max_batch_size]
    tokens = [count for count in _MEASURED_TOKENS if 1 < count <= room]
    if not tokens:
        return None
    sequence = RunningSequence(0, [0], StoppingParameters(1), blocks=blocks)
    runner.forward(0, [PromptChunk.next_of(sequence, 1)])

    def set_back() -> None:
        runner.truncate(0)
        for row in range(rows[-1]):
            runner.promote(sequence, row)

    drafts = {count: _pass_with_draft(runner, sequence, count - 1, start) for count in tokens}
    drafts = {tokens: _captured_pass(runner, rows) for rows, tokens in runner.captured_drafts} or drafts
    passes: list[Callable[[], Tensor]] = [*(partial(runner.forward, count, []) for count in rows), *drafts.values()]
    seconds = _fastest(passes, group, set_back)
    runner.truncate(0)
    without_drafts, with_drafts = seconds[: len(rows)], seconds[len(rows) :]
    return StepCosts(dict(zip(rows, without_drafts, strict=True)), dict(zip(drafts, with_drafts, strict=True)))


def measure_rows(compute: Callable[[int], Tensor], most: int, group: ShardGroup | None) -> Line:
    """Measures a function of the number of rows, up to a bound. All shards use the measurements of the first one."""
    rows = [count for count in _MEASURED_TOKENS if count <= most]
    return Line(dict(zip(rows, _fastest([partial(compute, count) for count in rows], group), strict=True)))


def _fastest(
    computations: Sequence[Callable[[], Tensor]], group: ShardGroup | None, set_back: Callable[[], None] = lambda: None
) -> list[float]:
    """Returns the shortest seconds of each computation, those of the first shard for all shards.

    set_back: undoes the changes of a round.
    """
    fastest = [math.inf] * len(computations)
    rounds = quiet = 0
    started, over = time.perf_counter(), False
    while quiet < _QUIET_ROUNDS and not over:
        set_back()
        seconds = [_seconds(compute) for compute in computations]
        rounds += 1
        over = rounds >= _LEAST_ROUNDS and time.perf_counter() - started > _SECONDS
        if group is not None:  # all have to make as many rounds
            seconds, over = json.loads(group.exchange(json.dumps([seconds, over]))[0])
        better = any(new * _MUCH_FASTER < old for new, old in zip(seconds, fastest, strict=True))
        quiet = 0 if better else quiet + 1
        fastest = list(map(min, fastest, seconds))
    return fastest


def _pass_with_draft(runner: Runner, sequence: RunningSequence, tokens: int, start: int) -> Callable[[], Tensor]:
    chunk = PromptChunk(sequence, torch.zeros(tokens, dtype=torch.int64), start, True)
    return lambda: runner.forward(1, [chunk])


def _captured_pass(runner: Runner, rows: int) -> Callable[[], Tensor]:
    def run() -> Tensor:
        logits = runner.forward_drafts(rows, ())
        assert logits is not None
        return logits

    return run


def _seconds(compute: Callable[[], Tensor]) -> float:
    """Returns the seconds of one computation."""
    started = time.perf_counter()
    float(compute().flatten()[0])  # waits for the device
    return time.perf_counter() - started
