"""What crosses the border between the HTTP API and the scheduler.

The API validates and tokenises a request and hands it over with a sink. The scheduler puts the request into batches
and pushes each step's tokens into the sink, from its own task, while the shards compute the next step. So a sink
must be quick: it appends, detokenises, formats; it never waits.
"""

from dataclasses import dataclass, field
from typing import Protocol

from shared.stubs.generate_pb2 import Generation
from tgi_server.contract import FinishReason, Grammar, SamplingParameters
from tgi_server.router.errors import RouterError


class Sink(Protocol):
    """Where a request's tokens go. Called by the scheduler's task only, in order, and by nobody after the last call."""

    def started(self) -> None:
        """The request left the queue for the first time. Not called again after a preemption."""

    def push(self, generation: Generation) -> FinishReason | None:
        """Takes the tokens of one step.

        Returns the reason to end now when the text so far met a stop sequence, or the client is gone; None to go on.
        When `generation.finish_reason` is set the request ends in any case.
        """

    def finished(self, reason: FinishReason) -> None:
        """Nothing more comes; the request ended as it should."""

    def failed(self, error: RouterError) -> None:
        """Nothing more comes; the request did not end as it should."""


@dataclass(slots=True)
class ValidRequest:
    """A request that keeps every limit of the server.

    input_ids: the prompt's tokens. For encoder-decoder models, of the encoder.
    cache_namespace: requests of different ones share nothing in the prefix cache.
    """

    id: int
    input_ids: list[int]
    max_new_tokens: int
    sink: Sink
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    ignore_eos: bool = False
    logprobs: bool = False
    top_n_tokens: int = 0
    prefill_logprobs: bool = False
    grammar: Grammar | None = None
    adapter_id: str | None = None
    cache_namespace: str = ""
    trace_context: dict[str, str] = field(default_factory=dict)


class Submitter(Protocol):
    """What the API needs of the scheduler."""

    def submit(self, request: ValidRequest) -> None:
        """Queues the request; its sink hears of it from then on. Never waits."""

    def cancel(self, request_id: int) -> None:
        """Forgets the request within one decode step; its sink hears nothing more. Unknown ids are ignored."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server accepts, known once the shards have warmed up. All in tokens or requests."""

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
