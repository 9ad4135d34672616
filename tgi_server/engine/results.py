"""What a step yields, on the host."""

from dataclasses import dataclass, field

from tgi_server.contract import FinishReason


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens at one position, most likely first."""

    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompt and how likely each of its tokens was after those before it; NaN for the first."""

    ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Generation:
    """What one request got from a step.

    forced: tokens behind `token_id` that the request's grammar left no choice about. hidden: which of all these are
    no part of the text; 0 is `token_id`. error: why the request cannot go on.
    """

    request_id: int
    token_id: int
    forced: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)
    error: str | None = None
    logprob: float | None = None
    top_tokens: TopTokens | None = None
    prompt_tokens: PromptTokens | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """generations: one for each sequence that got a token. Times in nanoseconds."""

    generations: list[Generation]
    forward_ns: int
    total_ns: int
