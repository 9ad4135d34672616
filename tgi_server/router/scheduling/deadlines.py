"""The deadlines of requests: a forecast of which requests miss theirs, from recent steps, and an alarm at the next one.

A request that would certainly miss its deadline is refused at once.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf, isfinite

from tgi_server.router.limits import Limits
from tgi_server.router.scheduling.pace import Average, StepTimes
from tgi_server.router.scheduling.sequence import Sequence

# An answer is expected to be as long as the first decile of recent ones, as a share of its maximum length.
_RECENT_ANSWERS, _SHORT_SHARE = 64, 10
# Number of measurements in the moving averages; the last ones count most.
_RECENT_STEPS, _RECENT_PROMPTS = 64, 32
# A step counts as at most this many times the average: a machine may stand still for seconds.
_LONGEST_STEP = 20.0
# Estimates are right to a few percent. Margins: as a share of the time, and in seconds.
_MARGIN, _MARGIN_S = 0.05, 0.02
# A machine may be slower for some seconds, and in an overload all waiting requests would then be late together. To
# refuse some more requests costs nothing: the batch stays full.
_QUEUE_MARGIN = 0.15
# The margin grows with each request that is late nevertheless, and shrinks with each that is in time.
_LARGEST_MARGIN, _MORE_MARGIN, _CALMER = 0.3, 0.02, 0.99
# After this many seconds without a step, the machine may have become faster; only an accepted request can show it.
_VALID_S = 10.0
# Number of steps in which most texts can be completed; and the maximum share of a request's time for them.
_CLOSING_STEPS, _CLOSING_SHARE = 30, 0.25


class Forecast:
    """Estimates how long requests take, from measured steps. Before the first step, every request counts as in time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._times = StepTimes(partial(Average, _RECENT_STEPS))
        self._steps = Average(_RECENT_STEPS)  # seconds of steps that continue replies
        self._fresh_share = Average(_RECENT_PROMPTS)  # share of prompt tokens that were not cached
        self._fresh_tokens = Average(_RECENT_PROMPTS)  # tokens of a prompt that were not cached
        self._answer_tokens = Average(_RECENT_ANSWERS)
        self._lengths = deque[float](maxlen=_RECENT_ANSWERS)
        self._length = 0.0
        self._measured_at = -inf
        self._margin = _QUEUE_MARGIN

    @property
    def token_s(self) -> float | None:
        """Seconds to compute a prompt token; None before it has been measured."""
        return self._times.token_s

    def observe(self, replies: int, prompt_tokens: int, seconds: float, now: float) -> None:
        """Records a step's duration, the number of replies that it continued, and of prompt tokens that it computed."""
        self._measured_at = now
        decode_s, token_s = self._times.decode_s(max(replies, 1)), self._times.token_s
        known = decode_s is not None and (token_s is not None or not prompt_tokens)
        longest = _LONGEST_STEP * ((decode_s or 0.0) + prompt_tokens * (token_s or 0.0)) if known else inf
        self._times.observe(replies, prompt_tokens, min(seconds, longest))
        if replies:
            self._steps.add(seconds)

    def began(self, sequence: Sequence) -> None:
        """Records how much of a prompt was cached."""
        fresh = sequence.prompt_tokens - sequence.cached
        self._fresh_share.add(fresh, sequence.prompt_tokens)
        self._fresh_tokens.add(fresh)

    def ended(self, sequence: Sequence) -> None:
        """Records the length of a complete answer, as a share of its maximum length, and lowers the margin."""
        self._margin = max(_QUEUE_MARGIN, _CALMER * self._margin)
        self._answer_tokens.add(sequence.generated)
        self._lengths.append(sequence.generated / sequence.most_generated)
        self._length = sorted(self._lengths)[len(self._lengths) // _SHORT_SHARE]

    def missed(self) -> None:
        """Records that a request was accepted but will be late, and raises the margin."""
        self._margin = min(_LARGEST_MARGIN, self._margin + _MORE_MARGIN)

    def seconds_too_late(
        self, sequence: Sequence, ahead: Iterable[Sequence], running: Collection[Sequence], now: float
    ) -> float:
        """Returns the seconds by which a request certainly misses its deadline; 0 if it may be in time.

        ahead: waiting requests that are served before it. running: requests that are not preempted for it.
        """
        request, ahead = sequence.request, list(ahead)
        sure = self._is_sure(now, len(ahead) + len(running))
        if not isfinite(min(request.deadline, request.first_token_by)) or not sure:
            return 0.0
        crowded = len(running) + len(ahead) + 1 >= self._limits.max_batch_size
        # In an overload the queue grows until its last request is just about in time: there has to be a safety margin.
        margin = -self._margin if ahead else _MARGIN
        return self._too_late(sequence, self._seconds_to_join(ahead, running), now, margin, crowded=crowded)

    def is_hopeless(self, sequence: Sequence, now: float, others: int) -> bool:
        """Returns True if a waiting request would be too late even if it joined now.

        others: number of other running and waiting requests. If they fill the batch, there is no margin: a request that
        is late slows the others down for nothing.
        """
        if not self._is_sure(now, others):
            return False
        crowded = others >= self._limits.max_batch_size
        return self._too_late(sequence, 0.0, now, 0.0 if crowded else _MARGIN, crowded=crowded) > 0

    def _too_late(self, sequence: Sequence, waits_s: float, now: float, margin: float, *, crowded: bool) -> float:
        """Returns the seconds by which a request that joins in `waits_s` misses its deadline; 0 if it may be in time.

        margin: share of the time left by which it has to be late.
        """
        request = sequence.request
        first_s = waits_s + self._prompt_s(sequence)
        last_s = first_s if sequence.ends_early else first_s + self._answer_s(sequence, crowded=crowded)
        return max(_late(first_s, request.first_token_by - now, margin), _late(last_s, request.deadline - now, margin))

    def is_pressing(self, sequence: Sequence, now: float) -> bool:
        """Returns True if a waiting request would be too late after waiting for another `max_waiting_tokens` steps."""
        deadline = min(sequence.request.deadline, sequence.request.first_token_by)
        if not isfinite(deadline) or self._times.decode_s(1) is None:
            return False
        steps = self._limits.max_waiting_tokens * self._step_s(self._limits.max_batch_size)
        own = self._prompt_s(sequence)
        own += 0.0 if sequence.ends_early else self._answer_s(sequence, crowded=True)
        return now + steps + own + _MARGIN_S > deadline

    def can_wait(self, sequence: Sequence, now: float) -> bool:
        """Returns False if a request can just about be in time, so that no other should overtake it."""
        own = self._prompt_s(sequence)
        own += 0.0 if sequence.ends_early else self._answer_s(sequence, crowded=False)
        left = min(sequence.request.deadline, sequence.request.first_token_by) - now
        return not own <= left <= own * (1 + _QUEUE_MARGIN) + _MARGIN_S

    def has_to_close(self, sequence: Sequence, now: float) -> bool:
        """Returns True if the grammar of a request has to start completing the text now to meet the deadline."""
        given_s = sequence.request.deadline - sequence.submitted_at
        closing_s = min(_CLOSING_STEPS * (self._steps.value or 0.0), _CLOSING_SHARE * given_s)
        return sequence.deadline - now <= closing_s

    def _is_sure(self, now: float, others: int) -> bool:
        """Returns True if estimates are reliable: steps were measured, recently if no other requests run or wait."""
        return self._times.decode_s(1) is not None and (others > 0 or now - self._measured_at <= _VALID_S)

    def _seconds_to_join(self, ahead: Iterable[Sequence], running: Collection[Sequence]) -> float:
        """Returns the seconds until all requests ahead have joined the batch and there is room for one more."""
        places = [self._tokens_left(each) for each in running]
        free = self._limits.max_batch_size - len(places)
        places += [0.0] * max(0, free)
        heapify(places)
        prompts = sum(self._fresh(each) for each in running)
        crowd = len(running)
        for each in ahead:
            crowd += 1
            prompts += self._fresh(each)
            heappush(places, heappop(places) + self._tokens_left(each))
        token_s = self._times.token_s or 0.0
        return places[0] * self._step_s(min(crowd + 1, self._limits.max_batch_size)) + prompts * token_s

    def _answer_s(self, sequence: Sequence, *, crowded: bool) -> float:
        """Returns the seconds that an answer takes. crowded: True if other requests join meanwhile and take time."""
        if not crowded:
            return self._tokens_left(sequence) * self._step_s(1)
        places = self._limits.max_batch_size
        return self._tokens_left(sequence) * (self._step_s(places) + places * self._joining_s)

    @property
    def _joining_s(self) -> float:
        """Seconds of prompts per step and place in a full batch: a prompt's time divided by the tokens of an answer."""
        tokens = self._answer_tokens.value
        return (self._fresh_tokens.value or 0.0) * (self._times.token_s or 0.0) / tokens if tokens else 0.0

    def _step_s(self, replies: int) -> float:
        return self._times.decode_s(replies) or 0.0

    def _tokens_left(self, sequence: Sequence) -> float:
        return max(1.0, self._length * sequence.most_generated - sequence.generated)

    def _fresh(self, sequence: Sequence) -> float:
        """Returns the expected number of prompt tokens that still have to be computed."""
        if sequence.started and sequence.remaining == 0:
            return 0.0
        return sequence.remaining * (1.0 if sequence.started else self._fresh_share.value or 0.0)

    def _prompt_s(self, sequence: Sequence) -> float:
        return self._fresh(sequence) * (self._times.token_s or 0.0)


def _late(seconds: float, left: float, margin: float) -> float:
    """Returns by how much `seconds` exceeds `left`; 0 unless it does by more than `margin`, a share of `left`."""
    return max(seconds - left, _MARGIN_S) if left < inf and seconds > left * (1 + margin) else 0.0


class DeadlineAlarm:
    """Calls `expire` at the next deadline, even while the shards compute one long step.

    The deadline of a request that has ended may still cause a call.
    """

    def __init__(self, expire: Callable[[], None], clock: Callable[[], float]) -> None:
        """clock: returns seconds; deadlines are times of this clock."""
        self._expire = expire
        self._clock = clock
        self._next = inf  # no deadline is earlier
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts to set timers on the event loop."""
        self._loop = loop
        self._set()

    def stop(self) -> None:
        """Cancels the timer and sets no more."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()

    def add(self, deadline: float) -> None:
        """Adds the deadline of a request."""
        if deadline < self._next:
            self._next = deadline
            self._set()

    def is_due(self, now: float) -> bool:
        """Returns True if a deadline may have passed."""
        return now >= self._next

    def reset(self, deadlines: Iterable[float]) -> None:
        """Replaces all deadlines by those of the remaining requests."""
        self._next = min(deadlines, default=inf)
        self._set()

    def _set(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._loop is not None and self._next < inf:
            self._timer = self._loop.call_at(self._loop.time() + self._next - self._clock(), self._ring)

    def _ring(self) -> None:
        self._expire()
        self._set()
