"""The HTTP side of a router without sockets and shards: a service, a scheduler that the test decides, and a client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.stubs import generate_pb2 as pb
from tests.fakes.simulation import AdapterShards
from tests.fakes.vocabularies import BOS, EOS, byte_level
from tests.grammars import no_fault
from tgi_server.contract import FinishReason
from tgi_server.router.answers.formats import tool_format
from tgi_server.router.answers.tools import AnswerForm
from tgi_server.router.api.access import AccessRules
from tgi_server.router.api.app import create_app
from tgi_server.router.api.connections import REFUSE, WATCH
from tgi_server.router.api.memory import LEASE, Account, Lease
from tgi_server.router.errors import RouterError, Unhealthy
from tgi_server.router.limits import Limits
from tgi_server.router.metrics import Metrics
from tgi_server.router.option_reader import OptionReader
from tgi_server.router.scheduling.adapter_registry import Adapters
from tgi_server.router.service import Capacity, ModelDescription, RequestPolicy, Service, TextParts
from tgi_server.router.submission import PreparedRequest, Sink
from tgi_server.router.text.chat_template import ChatTemplate
from tgi_server.router.text.preparation import Preparer
from tgi_server.router.text.tokenizer import TextTokenizer, TokenizerThreads
from tgi_server.router.text.tokenizer_config import DEFAULT_TEMPLATE, TokenizerConfig
from tgi_server.wire import finish_reason_to_message

LIMITS = Limits(
    max_concurrent_requests=8,
    max_best_of=2,
    max_stop_sequences=2,
    max_top_n_tokens=5,
    max_input_tokens=300,
    max_total_tokens=400,
    max_batch_prefill_tokens=1000,
    max_batch_total_tokens=4000,
    max_waiting_tokens=20,
    waiting_served_ratio=0.3,
    max_batch_size=8,
    max_client_batch_size=4,
)
VOCAB_SIZE = 300
PAYLOAD_LIMIT = 10_000
LOGPROB = -0.25
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
_CONFIG = TokenizerConfig({"bos_token": BOS, "eos_token": EOS}, chat_templates={DEFAULT_TEMPLATE: _TEMPLATE})


class ScriptedScheduler:
    """Stands in for the scheduler: each request gets the next of `texts`, and the last one again and again.

    end: the token with which the model ends each of them.
    error: what requests fail with instead, while it is set. held: requests are queued and get nothing.
    submitted: the requests so far. cancelled: the ids of those that were forgotten. progress: how far these had come.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.texts = ["hello world"]
        self.end = EOS
        self.error: RouterError | None = None
        self.held = False
        self.progress = ""
        self.submitted: list[PreparedRequest] = []
        self.cancelled: list[int] = []
        self._tokenizer = tokenizer

    def submit(self, request: PreparedRequest, sink: Sink) -> None:
        self.submitted.append(request)
        if not self.held:
            asyncio.get_running_loop().call_soon(self._answer, request, sink, self._next_text())

    def cancel(self, request_id: int) -> str:
        self.cancelled.append(request_id)
        return self.progress

    def _next_text(self) -> str:
        return self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]

    def _answer(self, request: PreparedRequest, sink: Sink, text: str) -> None:
        sink.started(0)
        if self.error is not None:
            sink.failed(self.error)
            return
        ids = self._tokenizer.encode(text + self.end, add_special_tokens=False).ids
        reason = FinishReason.EOS_TOKEN
        if len(ids) > request.options.stopping.max_new_tokens:
            ids, reason = ids[: request.options.stopping.max_new_tokens], FinishReason.LENGTH
        for position, token_id in enumerate(ids):
            generation = pb.Generation(
                token_ids=[token_id], logprobs=[LOGPROB] if request.options.report.logprobs else []
            )
            if position == len(ids) - 1:
                generation.finish_reason = finish_reason_to_message(reason)
            stopped = sink.push(generation)
            if stopped is not None:
                sink.finished(stopped)
                return
        sink.finished(reason)


class Shards:
    """Stands in for the shards' health check."""

    def __init__(self) -> None:
        self.well = True

    async def check(self) -> None:
        if not self.well:
            raise Unhealthy("the shards do not respond")


class RouterService:
    """A service with the byte-level vocabulary, and the parts that it uses."""

    def __init__(self, **changes: Any) -> None:
        """changes: fields of Service in place of the usual ones."""
        self.tokenizer = byte_level()
        self.threads = TokenizerThreads(self.tokenizer, 1)
        self.scheduler = ScriptedScheduler(self.tokenizer)
        self.shards = Shards()
        self.adapter_shards = AdapterShards()
        adapters = Adapters(cast(Any, self.adapter_shards), max_loras=2)
        answer_form = AnswerForm(tool_format("json", ""), None, self.tokenizer.special_tokens)
        usual: dict[str, Any] = {
            "model": ModelDescription(
                "maker/model", ["maker/model"], None, "cpu", encoder_decoder=False, version="1.2.3"
            ),
            "limits": LIMITS,
            "policy": RequestPolicy(PAYLOAD_LIMIT, validation_workers=1, max_stored_responses=10),
            "text": TextParts(self.tokenizer, self.threads, ChatTemplate(_CONFIG), None, answer_form),
            "preparer": Preparer(LIMITS, self.threads, VOCAB_SIZE, None, no_fault, adapters),
            "submitter": self.scheduler,
            "capacity": Capacity(LIMITS.max_concurrent_requests),
            "metrics": Metrics(),
            "tracer": None,
            "check_health": self.shards.check,
            "options": OptionReader(LIMITS, VOCAB_SIZE),
            "adapters": adapters,
        }
        self.service = Service(**(usual | changes))

    @asynccontextmanager
    async def client(self, rules: AccessRules | None = None) -> AsyncIterator[httpx.AsyncClient]:
        """A client whose requests go straight to the application."""
        app = _connected(create_app(self.service, rules or AccessRules()))
        transport = httpx.ASGITransport(app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                yield client
        finally:
            self.threads.close()


def _connected(app: ASGIApp) -> ASGIApp:
    """Returns `app` with the state that the server's connections give each request."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        lease = Lease(Account(2**30, 1.0), "", lambda: None)
        await app({**scope, "state": {REFUSE: lambda: None, WATCH: lambda watcher: None, LEASE: lease}}, receive, send)

    return call
