"""/v1/chat/completions."""

import json
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shared.stubs import generate_pb2 as pb
from tgi_server.router.api.documentation import OPENAI_ERRORS, described_body, event_stream_of
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.requests import AllEnded, DirectRoute, Exchange, respond_to
from tgi_server.router.api.responses import event, number, quoted
from tgi_server.router.api.routes.chat_choices import ChatChoices, ToolCallFormatter, Write, tool_finish_reason
from tgi_server.router.api.routes.chat_prompt import ChatPlan, plan_chat
from tgi_server.router.api.routes.openai import DONE, Envelope, finish_reason, usage_json
from tgi_server.router.schemas.chat import ChatCompletion, ChatCompletionChunk, ChatRequest
from tgi_server.router.service import Service
from tgi_server.router.text.token_stream import AnyStream, CollectedTokens
from tgi_server.router.text.tokenizer import TextTokenizer


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation, in one piece or as server-sent events",
        response_model=ChatCompletion,
        responses=OPENAI_ERRORS | event_stream_of(ChatCompletionChunk),
        openapi_extra=described_body(ChatRequest),
    )
    async def chat_completions(request: Request) -> Response:
        return await respond_to(service, request, ChatRequest, answer_chat)

    return router


async def answer_chat(exchange: Exchange, request: ChatRequest) -> Response:
    """Responds with the next message of a conversation."""
    plan = plan_chat(exchange.service, request, exchange.size)
    exchange.reserve(plan.choices - 1)
    return await (_stream if request.stream else _whole)(exchange, plan)


async def _whole(exchange: Exchange, plan: ChatPlan) -> Response:
    service = exchange.service
    end = AllEnded(plan.choices)
    choices = ChatChoices(exchange, plan, end)
    prompt = await choices.begin(lambda index: CollectedTokens())
    await exchange.wait_for(end.future)
    streams = [choices.streams[index] for index in range(plan.choices)]
    shown = ",".join(
        _choice(service.tokenizer, index, stream, logprobs=plan.logprobs) for index, stream in enumerate(streams)
    )
    envelope = Envelope("chat.completion", "chatcmpl", service.model)
    text = envelope.wrap(shown, usage_json(choices.prompt_tokens, streams))
    return exchange.respond(text, characters=len(prompt), streams=streams)


def _choice(tokenizer: TextTokenizer, index: int, stream: AnyStream, *, logprobs: bool) -> str:
    """Returns JSON of a choice that has ended."""
    output = stream.output
    assert stream.finish_reason is not None
    entries = "null"
    if isinstance(output, ToolCallFormatter):
        function = f'{{"name":{quoted(output.named.result())},"arguments":{quoted("".join(output.arguments))}}}'
        call = f'{{"id":"{output.call_id}","type":"function","function":{function}}}'
        message = f'{{"role":"assistant","content":null,"tool_calls":[{call}]}}'
        reason = tool_finish_reason(stream.finish_reason)
    else:
        assert isinstance(output, CollectedTokens)
        message = f'{{"role":"assistant","content":{quoted(output.text)}}}'
        reason = finish_reason(stream.finish_reason)
        if logprobs:
            tops: Sequence[pb.TopTokens | None] = output.top_tokens or [None] * len(output.texts)
            tokens = zip(output.texts, output.logprobs, tops, strict=True)
            entries = f'{{"content":[{",".join(_logprobs(tokenizer, *token) for token in tokens)}]}}'
    return f'{{"index":{index},"message":{message},"logprobs":{entries},"finish_reason":"{reason}"}}'


def _logprobs(
    tokenizer: TextTokenizer, text: str, logprob: float | None, top: pb.TopTokens | None, *, drafted: bool = False
) -> str:
    """Returns one token of `logprobs.content`. That it had been drafted is a member that OpenAI does not have."""
    tops = [] if top is None else list(zip(top.ids, top.logprobs, strict=True))
    alternatives = ",".join(f"{{{_logprob(tokenizer.token_text(each), value)}}}" for each, value in tops)
    more = ',"drafted":true' if drafted else ""
    return f'{{{_logprob(text, logprob)},"top_logprobs":[{alternatives}]{more}}}'


def _logprob(text: str, logprob: float | None) -> str:
    return f'"token":{quoted(text)},"logprob":{number(logprob)},"bytes":{json.dumps(list(text.encode()))}'


async def _stream(exchange: Exchange, plan: ChatPlan) -> Response:
    options = plan.request.stream_options
    whole_usage = options is not None and options.include_usage
    outbox = Outbox()
    envelope = Envelope("chat.completion.chunk", "chatcmpl", exchange.service.model)

    def last_words() -> bytes:
        if not whole_usage:
            return b""
        return event(envelope.wrap("", usage_json(choices.prompt_tokens, choices.streams.values())))

    end = exchange.stream_end(outbox, sequences=plan.choices, last_words=last_words, trailer=DONE)
    choices = ChatChoices(exchange, plan, end)
    chunks = _Chunks(outbox, envelope, usage="null" if whole_usage else None)
    tokenizer = exchange.service.tokenizer
    prompt = await choices.begin(
        lambda index: _TextChunks(chunks, index, tokenizer if plan.logprobs else None), chunks.tool_call
    )
    return exchange.stream(outbox, characters=len(prompt))


class _Chunks:
    """Writes the chunks of one response."""

    def __init__(self, outbox: Outbox, envelope: Envelope, usage: str | None) -> None:
        """usage: JSON that each chunk has for it."""
        self._outbox = outbox
        self._envelope = envelope
        self._usage = usage

    def write(self, index: int, delta: str, logprobs: str, reason: str | None) -> None:
        """Writes a chunk with the next piece of a choice. delta, logprobs: JSON."""
        told = "null" if reason is None else f'"{reason}"'
        choice = f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{told}}}'
        self._outbox.write(event(self._envelope.wrap(choice, self._usage)))

    def tool_call(self, index: int) -> Write:
        """Returns what writes the pieces of a call."""

        def write(call_id: str, name: str | None, arguments: str, reason: str | None) -> None:
            named = "" if name is None else f'"name":{quoted(name)},'
            function = f'{{{named}"arguments":{quoted(arguments)}}}'
            call = f'{{"index":0,"id":"{call_id}","type":"function","function":{function}}}'
            self.write(index, f'{{"role":"assistant","tool_calls":[{call}]}}', "null", reason)

        return write


class _TextChunks:
    """Writes a chunk for each token that shows something; of the others, the logprobs wait for the next chunk."""

    __slots__ = ("_chunks", "_index", "_logprobs", "_tokenizer")

    def __init__(self, chunks: _Chunks, index: int, tokenizer: TextTokenizer | None) -> None:
        """index: of the choice. tokenizer: names the tokens of logprobs; None: there are none to report."""
        self._chunks = chunks
        self._index = index
        self._tokenizer = tokenizer
        self._logprobs: list[str] = []

    def token(
        self,
        stream: AnyStream,
        token_id: int,
        text: str,
        visible: str,
        logprob: float | None,
        top: pb.TopTokens | None,
    ) -> None:
        if self._tokenizer is not None:
            self._logprobs.append(_logprobs(self._tokenizer, text, logprob, top, drafted=stream.drafted))
        if visible or stream.finish_reason is not None:
            self._write(stream, visible)

    def rest(self, stream: AnyStream, text: str) -> None:
        if self._tokenizer is not None:
            self._logprobs.append(_logprobs(self._tokenizer, text, None, None))
        self._write(stream, text)

    def _write(self, stream: AnyStream, visible: str) -> None:
        logprobs = "null" if self._tokenizer is None else f'{{"content":[{",".join(self._logprobs)}]}}'
        self._logprobs.clear()
        reason = None if stream.finish_reason is None else finish_reason(stream.finish_reason)
        self._chunks.write(self._index, f'{{"role":"assistant","content":{quoted(visible)}}}', logprobs, reason)
