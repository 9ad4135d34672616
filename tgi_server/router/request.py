"""Requests as the HTTP API hands them to the scheduler, and the sinks that their tokens go to.

The API validates and tokenises a request and hands it over with a sink. The scheduler puts the request into batches
and pushes each step's tokens into the sink, from its own task, while the shards compute the next step. So a sink
must be quick: it appends, detokenises, formats; it never waits.
"""

from dataclasses import dataclass, field
from typing import Protocol

from shared.stubs.generate_pb2 import Generation
from tgi_server.contract import FinishReason, Grammar, ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.router.errors import RouterError


class Sink(Protocol):
    """The receiver of a request's tokens. Only the scheduler's task calls it, in order, and not after the last call."""

    def started(self) -> None:
        """Hears that the request left the queue for the first time. Not called again after a preemption."""

    def push(self, generation: Generation) -> FinishReason | None:
        """Takes the tokens of one step.

        Returns the reason to end now when the text so far met a stop sequence, or the client is gone; None to go on.
        When `generation.finish_reason` is set the request ends in any case.
        """

    def finished(self, reason: FinishReason) -> None:
        """Hears that nothing more comes; the request ended as it should."""

    def failed(self, error: RouterError) -> None:
        """Hears that nothing more comes; the request did not end as it should."""


@dataclass(slots=True)
class ValidRequest:
    """A request that keeps every limit of the server.

    input_ids: the prompt's tokens. For encoder-decoder models, of the encoder.
    cache_namespace: requests of different ones share nothing in the prefix cache.
    """

    id: int
    input_ids: list[int]
    stopping: StoppingParameters
    sink: Sink
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    report: ReportParameters = field(default_factory=ReportParameters)
    grammar: Grammar | None = None
    adapter_id: str | None = None
    cache_namespace: str = ""
    trace_context: dict[str, str] = field(default_factory=dict)


class Submitter(Protocol):
    """The part of the scheduler that the API uses."""

    def submit(self, request: ValidRequest) -> None:
        """Queues the request; its sink hears of it from then on. Never waits."""

    def cancel(self, request_id: int) -> None:
        """Forgets the request within one decode step; its sink hears nothing more. Unknown ids are ignored."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the server, known once the shards have warmed up. All in tokens or requests."""

    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    max_waiting_tokens: int
    waiting_served_ratio: float
    max_batch_size: int
    max_client_batch_size: int
