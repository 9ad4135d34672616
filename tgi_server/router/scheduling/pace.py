"""A bound of the prompt tokens that ride along with running replies, so that these keep their pace."""

from collections import defaultdict, deque
from functools import partial
from statistics import median

# Prompt tokens that ride along until it has been measured what they cost.
UNMEASURED_TOKENS = 512
# The target for the gap between two tokens of a reply, in steps without prompts. Two thirds of such a step are left to
# prompts, so these are computed nearly as fast as alone.
_TARGET_STEPS = 3.0
# When a crowd comes while few replies run, the target is longer: short steps would make all others wait, and the more
# of them there are, the fewer are those whose gap is a long one. But it is no longer than this for their sake.
_LONGEST_FOR_A_CROWD_S = 0.5
# Prompt tokens of a step at least, if there is a target and no room for more: with fewer, prompts hardly progress.
_LEAST_TOKENS = 8
# Steps that an estimate is the median of: a step that something else held up does not count, and a change soon does.
_RECENT_STEPS = 15


class StepTimes:
    """The time of a step without prompts, by the number of replies that it continues, and of each prompt token besides.

    Both are measured while serving. The time of a token is what it was in chunks of the size in use: the first few cost
    less than others, where a step waits for the weights, and long prompts cost more.
    """

    def __init__(self, least_tokens: int) -> None:
        """least_tokens: steps with fewer prompt tokens do not count."""
        self._least_tokens = least_tokens
        recent = partial(deque[float], maxlen=_RECENT_STEPS)
        self._decode_s: defaultdict[int, deque[float]] = defaultdict(recent)  # by the binary digits of the replies
        self._token_s = recent()

    def observe(self, replies: int, prompt_tokens: int, seconds: float) -> None:
        """Notes a step's duration, the replies that it continued, and the prompt tokens that it computed."""
        if not prompt_tokens:
            self._decode_s[replies.bit_length()].append(seconds)
        elif prompt_tokens >= self._least_tokens and (decode_s := self.decode_s(max(replies, 1))) is not None:
            self._token_s.append(max(0.0, seconds - decode_s) / prompt_tokens)

    @property
    def token_s(self) -> float | None:
        """The seconds of a prompt token; None as long as there has been none."""
        return median(self._token_s) if self._token_s else None

    def decode_s(self, replies: int) -> float | None:
        """Returns the seconds of a step that only continues replies; None as long as there has been none.

        Where none of as many replies has been measured, the next larger one counts, or else the largest.
        """
        digits = replies.bit_length()
        known = min((each for each in self._decode_s if each >= digits), default=max(self._decode_s, default=None))
        return None if known is None else median(self._decode_s[known])


class PromptPace:
    """Estimates what steps take, from the last ones, and bounds the prompt tokens of the next one.

    Steps that begin prompts while no reply runs do not count.
    """

    def __init__(self, max_tokens: int, block_size: int, target_gap_s: float | None = None) -> None:
        """max_tokens: prompt tokens of any step. block_size: tokens of a KV block; 1 where there are none.

        target_gap_s: for the gap between two tokens of a reply; None: a multiple of a step without prompts.
        """
        self._max_tokens = max_tokens
        self._block_size = block_size
        self._target_gap_s = target_gap_s
        self._least_tokens = block_size if target_gap_s is None else min(block_size, _LEAST_TOKENS)
        self._times = StepTimes(self._least_tokens)

    def observe(self, replies: int, prompt_tokens: int, seconds: float) -> None:
        """Notes a step's duration, the replies that it continued, and the prompt tokens that it computed."""
        if replies:
            self._times.observe(replies, prompt_tokens, seconds)

    @property
    def measured(self) -> bool:
        """True once a step without prompts has been measured."""
        return self._times.decode_s(1) is not None

    def tokens_beside(self, replies: int, expected: int) -> int:
        """Returns how many prompt tokens a step may compute that continues `replies` replies.

        They fill whole KV blocks, at least one, so that prompts always progress. With a target of the operator's they
        may fill a part of one.

        expected: replies once all that wait for their first token have it. The default target is that for this many,
        and longer by the square of the share of them that runs already, up to half a second.
        """
        decode_s, goal_s = self._times.decode_s(replies), self._target_gap_s
        expected = max(replies, expected)
        if goal_s is None and (expected_s := self._times.decode_s(expected)) is not None:
            goal_s = _TARGET_STEPS * expected_s
            goal_s = max(goal_s, min(_LONGEST_FOR_A_CROWD_S, goal_s * (expected / replies) ** 2))
        token_s = self._times.token_s
        if decode_s is None or goal_s is None or token_s is None:
            return min(UNMEASURED_TOKENS, self._max_tokens)
        spare_s = max(0.0, goal_s - decode_s)
        if spare_s >= token_s * self._max_tokens:
            return self._max_tokens
        tokens = int(spare_s / token_s)
        if tokens >= self._block_size:
            tokens -= tokens % self._block_size
        return min(self._max_tokens, max(self._least_tokens, tokens))
