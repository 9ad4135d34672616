"""Limits the prompt tokens of a step, so that inter-token latency stays low and steps end soon."""

from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median

# Prompt tokens of a step before their cost has been measured.
UNMEASURED_TOKENS = 128
# Target for the time between two tokens of a reply, as a multiple of a step without prompts. Two thirds of such a step
# are left to prompts, which are thus computed nearly as fast as alone.
_TARGET_STEPS = 3.0
# The same for prompts with images: the encoding of other images runs between the steps (`shard/turns.py`), and takes
# longer than the prompts do.
_TARGET_STEPS_WITH_IMAGES = 2.0
# When more requests wait than replies run, the target is longer: short steps would make all of them wait, and the more
# requests wait, the fewer are those with a longer time between tokens. This is its maximum for that reason.
_LONGEST_FOR_A_CROWD_S = 0.15
# Minimum prompt tokens of a step if there is a target: with fewer, prompts hardly progress.
_LEAST_TOKENS = 8
# Minimum prompt tokens of a step before a step without prompts has been measured.
_LEAST_UNMEASURED = 64
# Target and maximum for the time of a step that continues no reply: new requests wait for it. Fewer than so many tokens
# are computed inefficiently, so the step may then take longer than the target.
_STEP_S, _LONGEST_STEP_S, _EFFICIENT_TOKENS = 0.5, 0.75, 128
# The last few of such steps are used for estimates. As short prompts say little about long ones, a step has at most
# _GROWTH times the prompt tokens of the largest of them.
_RECENT_PROMPT_STEPS, _GROWTH = 5, 4
# A step that takes less is sent before the one ahead of it has been answered, whatever it computes.
_SHORT_STEP_S = 0.1
# Number of steps in a median: enough to ignore a step that was held up, and few enough to follow a change.
_RECENT_STEPS = 15


class Average:
    """A moving average of recent measurements.

    A median would be wrong here: if the router reads a response late, one step seems long and the next one short.
    """

    def __init__(self, recent: int) -> None:
        self._kept = 1 - 1 / recent
        self._total = self._weight = 0.0

    def add(self, total: float, number: float = 1.0) -> None:
        """Adds `number` measurements, whose sum is `total`."""
        self._total = self._kept * self._total + total
        self._weight = self._kept * self._weight + number

    @property
    def value(self) -> float | None:
        """The average; None if nothing has been added."""
        return max(0.0, self._total) / self._weight if self._weight else None


class Median:
    """The median of recent measurements, which single steps that were held up do not change."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=_RECENT_STEPS)

    def add(self, total: float, number: float = 1.0) -> None:
        self._recent.append(max(0.0, total) / number)

    @property
    def value(self) -> float | None:
        return median(self._recent) if self._recent else None


class StepTimes:
    """The time of a step without prompts, by the number of replies that it continues, and the time of a prompt token.

    Both are measured while serving. A prompt token's time holds for chunks of the size in use: the first few tokens
    cost less, as the step waits for the weights anyway, and tokens of long prompts cost more.
    """

    def __init__(self, estimate: Callable[[], Average | Median]) -> None:
        self._decode_s: defaultdict[int, Average | Median] = defaultdict(estimate)  # by the bit length of replies
        self._token_s = estimate()

    def observe(self, replies: int, prompt_tokens: int, seconds: float) -> None:
        """Notes a step's duration, the replies that it continued, and the prompt tokens that it computed."""
        if not prompt_tokens:
            self._decode_s[replies.bit_length()].add(seconds)
        elif (decode_s := self.decode_s(max(replies, 1))) is not None:
            # In a step without replies, all of the time belongs to prompts.
            self._token_s.add(seconds - decode_s if replies else seconds, prompt_tokens)

    @property
    def token_s(self) -> float | None:
        """Seconds of a prompt token; None before the first one."""
        return self._token_s.value

    def decode_s(self, replies: int) -> float | None:
        """Returns the seconds of a step that only continues replies; None before the first one.

        If no step with as many replies (by bit length) was measured, uses the next larger one, or else the largest.
        """
        digits = replies.bit_length()
        known = min((size for size in self._decode_s if size >= digits), default=max(self._decode_s, default=None))
        return None if known is None else self._decode_s[known].value


class PromptPace:
    """Estimates the time of steps from recent ones, and limits the prompt tokens of the next one.

    Steps with replies and steps without are measured separately.
    """

    def __init__(self, max_tokens: int, block_size: int, target_gap_s: float | None = None) -> None:
        """max_tokens: maximum prompt tokens of a step. block_size: tokens of a KV block; 1: there are no blocks.

        target_gap_s: target for the time between two tokens of a reply; None: a multiple of a step without prompts.
        """
        self._max_tokens = max_tokens
        self._block_size = block_size
        self._target_gap_s = target_gap_s
        self._least_tokens = block_size if target_gap_s is None else min(block_size, _LEAST_TOKENS)
        self._times = StepTimes(Median)
        # Prompt tokens and seconds of steps that continue no reply.
        self._prompt_steps = deque[tuple[int, float]](maxlen=_RECENT_PROMPT_STEPS)

    def observe(self, replies: int, prompt_tokens: int, seconds: float) -> None:
        """Notes a step's duration, the replies that it continued, and the prompt tokens that it computed."""
        if replies and (not prompt_tokens or prompt_tokens >= self._least_tokens):
            self._times.observe(replies, prompt_tokens, seconds)
        elif not replies and prompt_tokens >= self._block_size:
            self._prompt_steps.append((prompt_tokens, seconds))

    @property
    def measured(self) -> bool:
        """True once a step without prompts has been measured."""
        return self._times.decode_s(1) is not None

    def tokens_alone(self) -> int:
        """Returns how many prompt tokens a step may compute that continues no reply.

        As many as take 0.5 s; if these are fewer than 128, then 128, or as many as take 0.75 s. If a step without
        prompts takes long, prompts get twice its time, so that most of the time is spent on them.
        """
        if not self._prompt_steps:
            return min(UNMEASURED_TOKENS, self._max_tokens)
        token_s, decode_s = self._alone_s()
        goal_s = max(_STEP_S, _TARGET_STEPS * decode_s) - decode_s
        most = min(self._max_tokens, _GROWTH * max(tokens for tokens, _ in self._prompt_steps))
        if goal_s >= token_s * most:
            return most
        tokens = int(max(goal_s / token_s, min(_EFFICIENT_TOKENS, (_LONGEST_STEP_S - decode_s) / token_s)))
        least = self._block_size if decode_s else _LEAST_UNMEASURED
        return min(most, max(least, tokens - tokens % self._block_size))

    def is_short(self, prompt_tokens: int) -> bool:
        """Returns True if a step with these prompt tokens and no replies is expected to take less than 0.1 s."""
        if not self._prompt_steps:
            return False
        token_s, decode_s = self._alone_s()
        return decode_s + token_s * prompt_tokens < _SHORT_STEP_S

    def _alone_s(self) -> tuple[float, float]:
        """Returns the seconds of a prompt token in a step that continues no reply, and of a step without prompts."""
        decode_s = self._times.decode_s(1) or 0.0
        largest = max(tokens for tokens, _ in self._prompt_steps)
        like_it = ((tokens, seconds) for tokens, seconds in self._prompt_steps if 2 * tokens >= largest)
        return median(max(0.0, seconds - decode_s) / tokens for tokens, seconds in like_it), decode_s

    def tokens_beside(self, replies: int, expected: int, *, images: bool = False) -> int:
        """Returns how many prompt tokens a step may compute that continues `replies` replies.

        They fill whole KV blocks, at least one, so that prompts always progress. If the operator has set a target, they
        may fill a part of a block.

        expected: number of replies once all requests that wait for their first token have it. The default target is
        computed for this number. If more wait than run, it is multiplied by the square of their ratio, up to 0.15 s.
        images: True if the prompts have images.
        """
        decode_s, goal_s = self._times.decode_s(replies), self._target_gap_s
        expected = max(replies, expected)
        if goal_s is None and (expected_s := self._times.decode_s(expected)) is not None:
            goal_s = (_TARGET_STEPS_WITH_IMAGES if images else _TARGET_STEPS) * expected_s
            goal_s = max(goal_s, min(_LONGEST_FOR_A_CROWD_S, goal_s * ((expected - replies) / replies) ** 2))
        token_s = self._times.token_s
        if token_s is None and self._prompt_steps:
            token_s, _ = self._alone_s()
        if decode_s is None or goal_s is None or token_s is None:
            return self.tokens_alone()
        spare_s = max(0.0, goal_s - decode_s)
        if spare_s >= token_s * self._max_tokens:
            return self._max_tokens
        tokens = int(spare_s / token_s)
        if tokens >= self._block_size:
            tokens -= tokens % self._block_size
        return min(self._max_tokens, max(self._least_tokens, tokens))
