"""Requests as the HTTP API hands them to the scheduler, and the sinks that their tokens go to.

The API validates and tokenizes a request and hands it over with a sink. The scheduler puts the request into batches
and pushes each step's tokens into the sink, from its own task, while the shards compute the next step. So a sink
must be quick: it appends, detokenizes, formats; it never waits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from shared.stubs.generate_pb2 import Generation
from tgi_server.contract import FinishReason, GenerationOptions, Image
from tgi_server.router.answers.reader import AnswerReader
from tgi_server.router.errors import RouterError
from tgi_server.router.prompt_source import PromptSource


class Sink(Protocol):
    """The receiver of a request's tokens. Only the scheduler calls it, on the event loop, in order, and not after the
    last call. It must not wait: the next step would not be planned meanwhile.
    """

    def started(self, cached_tokens: int) -> None:
        """Called when the request leaves the queue for the first time, not after a preemption.

        cached_tokens: prompt tokens that were in the prefix cache; rounded down if there is no cache namespace.
        """

    def push(self, generation: Generation) -> FinishReason | None:
        """Takes the tokens of one step.

        Returns the reason to end now when the text so far met a stop sequence, or the client is gone; None to continue.
        When `generation.finish_reason` is set the request ends in any case.
        """

    def finished(self, reason: FinishReason) -> None:
        """Called once, when the request has finished normally."""

    def failed(self, error: RouterError) -> None:
        """Called once, when the request has failed."""


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """Protects a prompt from being evicted from the prefix cache for a time.

    name: the next prompt with the same name and cache namespace replaces it. seconds: from the end of the request.
    """

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A tokenized prompt, with options within the limits of the server.

    input_ids: the prompt, cut to `truncate`; that of the encoder in encoder-decoder models. characters: length of the
    whole text. unenforced: constraints of the grammar that are left to the model, one per line. images: images of the
    prompt, in the order of their tokens. reader: creates the parser of an answer; None: it is text. source: its texts.

    The other fields are set when the request is queued. id: 0 until then. cache_namespace: requests with different ones
    share no cached prefix. deadline: time after which the answer is useless. first_token_by: the same for its first
    token. Both are `perf_counter` seconds. tenant: the name of the API key, if there are several. weight: weight of its
    share. keep: keeps its prompt in the prefix cache. early_tokens: number of tokens that are generated for a later
    request with the same body; 0: this is not an early answer.
    """

    input_ids: list[int]
    options: GenerationOptions
    characters: int = 0
    unenforced: tuple[str, ...] = ()
    images: tuple[Image, ...] = ()
    reader: Callable[[], AnswerReader] | None = None
    source: PromptSource | None = field(default=None, compare=False)
    id: int = 0
    cache_namespace: str = ""
    trace_context: dict[str, str] = field(default_factory=dict)
    deadline: float = inf
    first_token_by: float = inf
    tenant: str = ""
    weight: float = 1.0
    keep: KeptPrefix | None = None
    early_tokens: int = 0

    @property
    def seed(self) -> int | None:
        """The seed that `details` reports; None when tokens are not sampled."""
        return self.options.sampling.seed if self.options.sampling.do_sample else None

    @property
    def logprobs(self) -> int | None:
        """The number of alternatives that are reported for each token; None where no log-probabilities are."""
        return self.options.report.top_n_tokens if self.options.report.logprobs else None

    def times(self, sequences: int) -> "list[PreparedRequest]":
        """Returns copies of the request, each with a seed of its own: the request's, and those after it."""
        if sequences == 1:
            return [self]
        options, sampling = self.options, self.options.sampling
        seeds = ((sampling.seed + index) % 2**64 for index in range(sequences))
        return [replace(self, options=replace(options, sampling=replace(sampling, seed=seed))) for seed in seeds]


class Submitter(Protocol):
    """The part of the scheduler that the API uses."""

    def submit(self, request: PreparedRequest, sink: Sink) -> None:
        """Queues the request; the sink is called from now on, also before this returns. Never waits."""

    def cancel(self, request_id: int) -> str:
        """Cancels the request within one step; its sink is not called any more.

        Returns the request's progress, for the log; an empty text if the id is unknown.
        """
