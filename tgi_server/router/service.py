"""What the HTTP routes work with."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from tgi_server.router.capacity import Capacity
from tgi_server.router.chat_template import ChatTemplate
from tgi_server.router.metrics import Metrics
from tgi_server.router.request import Limits, Submitter
from tgi_server.router.special_tokens import SpecialTokens
from tgi_server.router.tokenization import TextTokenizer, TokenizerThreads
from tgi_server.router.tracing import RequestTracer
from tgi_server.router.validation import Validator


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is served, by what.

    compute_type: what `x-compute-type` says.
    version: of this server.
    """

    model_id: str
    revision: str | None
    compute_type: str
    encoder_decoder: bool
    version: str

    @property
    def fingerprint(self) -> str:
        """What OpenAI's answers call `system_fingerprint`."""
        return f"{self.version}-native"


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that answers requests, made once at start-up.

    check_health: raises Unhealthy when the shards do not answer.
    payload_limit: bytes of a request's body.
    special_tokens: that only the chat template may write; None: messages may, too.
    """

    model: ModelDescription
    limits: Limits
    tokenizer: TextTokenizer
    threads: TokenizerThreads
    template: ChatTemplate
    validator: Validator
    submitter: Submitter
    capacity: Capacity
    metrics: Metrics
    tracer: RequestTracer
    check_health: Callable[[], Awaitable[None]]
    payload_limit: int
    validation_workers: int
    special_tokens: SpecialTokens | None
    request_ids: Iterator[int] = field(default_factory=lambda: count(1))
