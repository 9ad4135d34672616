"""Everything that the HTTP routes work with."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal, Protocol

from opentelemetry.trace import Tracer

from tgi_server.router.answers.tools import AnswerForm
from tgi_server.router.errors import Overloaded
from tgi_server.router.limits import Limits
from tgi_server.router.media.images import ImageReader
from tgi_server.router.metrics import Metrics
from tgi_server.router.option_reader import OptionReader
from tgi_server.router.scheduling.adapter_registry import Adapters
from tgi_server.router.settings import ExplainedMisses
from tgi_server.router.stored_responses import StoredResponses
from tgi_server.router.submission import Submitter
from tgi_server.router.text.chat_template import ChatTemplate
from tgi_server.router.text.decisions import DecisionConfig
from tgi_server.router.text.encoder import Encoders
from tgi_server.router.text.prefix_miss import ExplainedRequests
from tgi_server.router.text.preparation import Preparer
from tgi_server.router.text.special_tokens import SpecialTokens
from tgi_server.router.text.tokenizer import TextTokenizer, TokenizerThreads
from tgi_server.router.text.tokenizer_config import TokenizerConfig

# Limit of bytes, and of number, of requests that come from this process itself.
UNLIMITED = 2**40


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model that is served, and the version of the server.

    model_type: the `model_type` of config.json, such as llama. names: names on OpenAI's routes; responses have the
    first. compute_type: the value of the header `x-compute-type`. fallbacks: reasons for parts that run on slower code
    than the device allows. quantization: format of the weights. weight_bytes: size of the model's files; 0: not known.
    kv_cache_dtype: dtype of keys and values. linear_kernels: names of the kernels of linear layers. forward_pass:
    description of the code that computes a step. speculate: maximum number of tokens drafted for a sequence in a step.
    device: cpu or cuda. dtype: dtype of activations. paged: True for a paged KV cache, False for padded batches.
    """

    model_id: str
    names: Sequence[str]
    revision: str | None
    compute_type: str
    encoder_decoder: bool
    version: str
    model_type: str = ""
    given_id: str | None = None  # as --model-id has it: perhaps a path, which no response shows
    speculate: int = 0
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    linear_kernels: str | None = None
    forward_pass: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    paged: bool = True
    weight_bytes: int = 0
    fallbacks: tuple[str, ...] = ()

    def is_named(self, name: str) -> bool:
        """Returns True for a name of the model itself. TGI's clients call every model `tgi`."""
        return name in (*self.names, self.model_id, self.given_id, "tgi")

    @property
    def computation(self) -> str:
        """The device, dtype and kind of batches, as text."""
        return f"{self.device}, {self.dtype}, {'paged' if self.paged else 'padded'} batches"

    @property
    def fingerprint(self) -> str:
        """The `system_fingerprint` of OpenAI's responses."""
        return f"{self.version}-native"


class Capacity:
    """Counts the sequences in flight, and refuses requests beyond the limit.

    One owner (a key, or an address) may take all `limit` places. Even then other owners are accepted: each may take an
    equal share of the limit, at most half of it, up to twice the limit in all.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()
        self.in_flight = 0

    def take(self, sequences: int, owner: str = "") -> None:
        """Takes places. Raises Overloaded when there are not enough."""
        in_flight, own = self.in_flight + sequences, self._held[owner] + sequences
        if in_flight > self._limit and (own > self._share(owner) or in_flight > 2 * self._limit):
            raise Overloaded(f"the server is busy: {self.in_flight} requests are in flight; try again later")
        self.in_flight = in_flight
        self._held[owner] = own

    def give_back(self, sequences: int, owner: str = "") -> None:
        """Gives places back."""
        self.in_flight -= sequences
        self._held[owner] -= sequences
        if not self._held[owner]:
            del self._held[owner]

    def _share(self, owner: str) -> int:
        """Returns the places that an owner may take although the limit is reached."""
        owners = len(self._held.keys() | {owner})
        return max(self._limit // max(owners, 2), 1)


@dataclass(frozen=True, slots=True)
class TextParts:
    """The parts that make tokens of conversations, and text of tokens.

    special_tokens: tokens that only the chat template may write; None: messages may, too. answer_form: the format of
    the model's reasoning and tool calls. images: reader of the images of requests; None: the model reads none, for the
    reason `no_images`. config: the tokenizer's configuration in the model's folder.
    """

    tokenizer: TextTokenizer
    threads: TokenizerThreads
    template: ChatTemplate
    special_tokens: SpecialTokens | None
    answer_form: AnswerForm
    images: ImageReader | None = None
    no_images: str = "this model reads text only"
    config: TokenizerConfig = field(default_factory=TokenizerConfig)


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """The settings that concern requests.

    payload_limit: bytes of a body. max_stored_responses: number of responses stored for /v1/responses. strict_fields:
    unknown fields are refused. is_local: requests come from this process itself, not over HTTP. ignored_fields: unknown
    fields that were logged. adapter_root: the folder below which adapters may be loaded from while the server runs;
    None: they may not. max_priority: the lowest number that requests may give as their priority. allow_sleep: clients
    may put the model to sleep. explain_misses: the setting of that name.
    """

    payload_limit: int
    validation_workers: int
    max_stored_responses: int
    strict_fields: bool = False
    adapter_root: Path | None = None
    max_priority: int = 0
    allow_sleep: bool = False
    explain_misses: ExplainedMisses = "own"
    is_local: bool = False
    ignored_fields: set[str] = field(default_factory=set)


ModelState = Literal["awake", "asleep", "loading", "failed"]


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in the lists of a server.

    service: None while it is not loaded. reason: message of its failure. generates: False for embedding and rerank
    models.
    """

    names: Sequence[str]
    service: "Service | None"
    state: ModelState = "awake"
    reason: str | None = None
    generates: bool = True


class Sleeping(Protocol):
    """Puts a model to sleep, and wakes it.

    on_wanted: called when something needs the model while it sleeps. log: writes a log line about the model.
    """

    on_wanted: Callable[[], None]
    log: Callable[[str], None]

    @property
    def awake(self) -> bool:
        """True while waiting requests may be computed."""

    async def sleep(self, *, grammars: bool = False) -> int:
        """Returns when the model sleeps. Raises CannotSleep and Unhealthy; then it is awake.

        grammars: True if the tables for grammars are freed, too.
        """

    async def wake(self) -> None:
        """Returns when the model is awake. Raises Unhealthy."""


async def _forget_nothing(_: str) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that answers requests, made once at start-up.

    options, preparer: make the options of requests, and the prepared requests of the scheduler. adapters: adapters that
    requests can name. check_health: raises Unhealthy if the shards do not answer. decisions: the configuration of
    decisions in the model's folder. encoders: embedding and rerank models. generates: False if only encoders are
    served. caches: True if there is a prefix cache. tenant_secret: secret for the names of tenants, which are then the
    same after a restart; None: they may differ. forget: deletes the cache of a namespace, and returns the number of
    deleted files. sleep_mode: sleep of the model; None: it cannot sleep. in_use: context of computations that do not go
    through the submitter; waits until the model is awake. explained: prefix-cache lookups of the latest requests.
    models: lists the models of a server of several models; None: this is the only one. stored: responses that later
    ones continue; None: the routes have their own.
    """

    model: ModelDescription
    limits: Limits
    policy: RequestPolicy
    text: TextParts
    options: OptionReader
    preparer: Preparer
    adapters: Adapters
    submitter: Submitter
    capacity: Capacity
    metrics: Metrics
    tracer: Tracer | None
    check_health: Callable[[], Awaitable[None]]
    decisions: DecisionConfig = field(default_factory=DecisionConfig)
    encoders: Encoders = field(default_factory=Encoders)
    generates: bool = True
    caches: bool = True
    tenant_secret: bytes | None = None
    forget: Callable[[str], Awaitable[int]] = _forget_nothing
    sleep_mode: Sleeping | None = None
    in_use: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    explained: ExplainedRequests = field(default_factory=ExplainedRequests)
    request_ids: Iterator[int] = field(default_factory=lambda: count(1))
    models: Callable[[], Sequence[ListedModel]] | None = None
    stored: StoredResponses | None = None

    def is_served(self, name: str) -> bool:
        """Returns True for a name of the model, of one of its adapters, or of a model that embeds or ranks."""
        return (
            (self.generates and self.model.is_named(name))
            or any(adapter.id == name for adapter in self.adapters)
            or self.encoders.named(name) is not None
        )

    def listed(self) -> Sequence[ListedModel]:
        """Returns all models of the server."""
        return [ListedModel(self.model.names, self)] if self.models is None else self.models()
