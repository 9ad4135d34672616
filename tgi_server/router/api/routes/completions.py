"""/v1/completions."""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.router.api.documentation import OPENAI_ERRORS, described_body, event_stream_of
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.requests import DirectRoute, Exchange, respond_to
from tgi_server.router.api.responses import event, quoted
from tgi_server.router.api.routes.openai import (
    DONE,
    Envelope,
    check_sequences,
    finish_reason,
    generation_parameters,
    usage_json,
)
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.completions import Chunk, CompletionFinal, CompletionRequest
from tgi_server.router.service import Service
from tgi_server.router.text.special_tokens import RenderedPrompt
from tgi_server.router.text.token_stream import AnyStream
from tgi_server.router.text.validation import CheckedRequest


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post(
        "/v1/completions",
        summary="Continue one prompt or several, in one piece or as server-sent events",
        response_model=CompletionFinal,
        responses=OPENAI_ERRORS | event_stream_of(Chunk),
        openapi_extra=described_body(CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        return await respond_to(service, request, CompletionRequest, complete)

    return router


async def complete(exchange: Exchange, request: CompletionRequest) -> Response:
    prompts = request.prompt.root
    choices = 1 if request.n is None else request.n
    _refuse(request)
    service, limits = exchange.service, exchange.service.openai_limits
    limit = limits.max_client_batch_size
    check_sequences(len(prompts), limit, "the number of prompts")
    check_sequences(len(prompts) * choices, limit, "the number of prompts times `n`")
    parameters = generation_parameters(request, service, max_tokens=request.max_tokens)
    check = service.validator.check
    checked = [await check(RenderedPrompt(each), parameters, size=exchange.size, limits=limits) for each in prompts]
    exchange.reserve(len(prompts) * choices - 1)
    sequences = [each for prompt in checked for each in prompt.times(choices)]
    prompt_tokens = sum(len(prompt.input_ids) for prompt in checked)
    characters = sum(map(len, prompts))
    if request.stream:
        return _stream(exchange, request, sequences, prompt_tokens, characters)
    return await _whole(exchange, request, sequences, prompt_tokens, characters)


def _refuse(request: CompletionRequest) -> None:
    if request.suffix:
        raise InvalidRequest("`suffix` is not supported: put it into the prompt as the model's format wants it")
    if request.echo:
        raise InvalidRequest("`echo` is not supported: the prompt is yours already")
    if request.logprobs is not None:
        raise InvalidRequest("`logprobs` is not supported here: /v1/chat/completions and /generate have logprobs")
    if request.best_of is not None and request.best_of > 1:
        raise InvalidRequest("`best_of` is not supported here: /generate has it")


async def _whole(
    exchange: Exchange,
    request: CompletionRequest,
    sequences: list[CheckedRequest],
    prompt_tokens: int,
    characters: int,
) -> Response:
    reveal = request.include_stop_str_in_output
    streams = await exchange.collect(sequences, reveal_stop=reveal, logprobs=False)
    choices = ",".join(_choice(index, stream.output.text, stream.finish_reason) for index, stream in enumerate(streams))
    envelope = Envelope("text_completion", "cmpl", exchange.service.model)
    text = envelope.wrap(choices, usage_json(prompt_tokens, streams, _cached(request, streams)))
    return exchange.respond(text, characters=characters, streams=streams)


def _stream(
    exchange: Exchange,
    request: CompletionRequest,
    sequences: list[CheckedRequest],
    prompt_tokens: int,
    characters: int,
) -> Response:
    outbox = Outbox()
    envelope = Envelope("text_completion", "cmpl", exchange.service.model)
    whole_usage = request.stream_options is not None and request.stream_options.include_usage
    streams: list[AnyStream] = []

    def last_words() -> bytes:
        if not whole_usage:
            return b""
        return event(envelope.wrap("", usage_json(prompt_tokens, streams, _cached(request, streams))))

    end = exchange.stream_end(outbox, sequences=len(sequences), last_words=last_words, trailer=DONE)
    for index, checked in enumerate(sequences):
        chunks = _CompletionChunks(outbox, envelope, index, whole_usage=whole_usage)
        streams.append(
            exchange.generate(checked, chunks, end, reveal_stop=request.include_stop_str_in_output, logprobs=False)
        )
    return exchange.stream(outbox, characters=characters)


def _cached(request: CompletionRequest, streams: Sequence[AnyStream]) -> int:
    """Returns how many tokens of the prompts had been computed for others; each prompt counts once."""
    return sum(stream.cached_tokens for stream in streams[:: request.n or 1])


class _CompletionChunks:
    """Writes a chunk for each token that shows something. The last one has the sequence's usage, as TGI's has."""

    __slots__ = ("_envelope", "_index", "_outbox", "_whole_usage")

    def __init__(self, outbox: Outbox, envelope: Envelope, index: int, *, whole_usage: bool) -> None:
        """whole_usage: usage comes once, for all sequences of the stream, behind the last of them."""
        self._outbox = outbox
        self._envelope = envelope
        self._index = index
        self._whole_usage = whole_usage

    def token(
        self,
        stream: AnyStream,
        token_id: int,
        text: str,
        visible: str,
        logprob: float | None,
        top: pb.TopTokens | None,
    ) -> None:
        if visible or stream.finish_reason is not None:
            self.rest(stream, visible)

    def rest(self, stream: AnyStream, text: str) -> None:
        choice = _choice(self._index, text, stream.finish_reason)
        self._outbox.write(event(self._envelope.wrap(choice, self._usage(stream))))

    def _usage(self, stream: AnyStream) -> str | None:
        if self._whole_usage:
            return "null"
        return None if stream.finish_reason is None else usage_json(stream.input_length, [stream], stream.cached_tokens)


def _choice(index: int, text: str, reason: FinishReason | None) -> str:
    name = "null" if reason is None else f'"{finish_reason(reason)}"'
    return f'{{"index":{index},"text":{quoted(text)},"logprobs":null,"finish_reason":{name}}}'
