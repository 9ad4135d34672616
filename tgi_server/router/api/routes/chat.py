"""/v1/chat/completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tgi_server.router.api.documentation import OPENAI_ERRORS, described_body, event_stream_of
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.requests import AllEnded, DirectRoute, Exchange, respond_to
from tgi_server.router.api.responses import event
from tgi_server.router.api.routes.chat_answer import ChatAnswer, PieceWriter, WholeChoice, delta_json
from tgi_server.router.api.routes.chat_prompt import ChatPrompt, plan_chat, prompt_for_chat
from tgi_server.router.api.routes.openai import DONE, Envelope, usage_json
from tgi_server.router.schemas.chat import ChatCompletion, ChatCompletionChunk, ChatRequest
from tgi_server.router.service import Service
from tgi_server.router.text.answer_reader import Piece
from tgi_server.router.text.token_stream import OnEnd, TokenStream


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
    service = exchange.service
    prompt = await prompt_for_chat(service, exchange.size, lambda: plan_chat(service, request))
    exchange.reserve(prompt.checked.options.n - 1)
    return _stream(exchange, request, prompt) if request.stream else await _whole(exchange, prompt)


@dataclass(frozen=True, slots=True)
class ChatChoices:
    """The choices of one request while they are generated."""

    prompt: ChatPrompt
    streams: Sequence[TokenStream[ChatAnswer]]

    @classmethod
    def begin(
        cls,
        exchange: Exchange,
        prompt: ChatPrompt,
        writer: Callable[[int], PieceWriter],
        on_end: OnEnd,
    ) -> "ChatChoices":
        """writer: makes what writes the choice of that index. on_end: called at the end of each choice."""
        service = exchange.service
        streams = [
            exchange.generate(
                checked,
                ChatAnswer(
                    None if prompt.reader is None else prompt.reader(),
                    writer(index),
                    service.tokenizer,
                    prompt.logprobs,
                    show_thoughts=prompt.show_thoughts,
                ),
                on_end,
                shown=service.answer_form.shown,
            )
            for index, checked in enumerate(prompt.checked.times(prompt.checked.options.n))
        ]
        return cls(prompt, streams)

    def usage(self) -> str:
        """Returns JSON of what the choices have used. The prompt is one for all of them."""
        return usage_json(len(self.prompt.checked.input_ids), self.streams, self.streams[0].cached_tokens)


async def _whole(exchange: Exchange, prompt: ChatPrompt) -> Response:
    number = prompt.checked.options.n
    end = AllEnded(number)
    written = [WholeChoice() for _ in range(number)]
    choices = ChatChoices.begin(exchange, prompt, written.__getitem__, end)
    await exchange.wait_for(end.future)
    logprobs = prompt.logprobs is not None
    shown = ",".join(choice.json(index, logprobs=logprobs) for index, choice in enumerate(written))
    envelope = Envelope("chat.completion", "chatcmpl", exchange.service.model, prompt.checked.options.adapter_id)
    text = envelope.wrap(shown, choices.usage())
    return exchange.respond(text, characters=len(prompt.text), streams=choices.streams)


def _stream(exchange: Exchange, request: ChatRequest, prompt: ChatPrompt) -> Response:
    options = request.stream_options
    whole_usage = options is not None and options.include_usage
    usage_so_far = options is not None and options.include_usage and options.continuous_usage_stats
    outbox = Outbox()
    envelope = Envelope("chat.completion.chunk", "chatcmpl", exchange.service.model, prompt.checked.options.adapter_id)

    def last_words() -> bytes:
        return event(envelope.wrap("", choices.usage())) if whole_usage else b""

    def usage() -> str | None:
        return choices.usage() if usage_so_far else "null" if whole_usage else None

    end = exchange.stream_end(outbox, sequences=prompt.checked.options.n, last_words=last_words, trailer=DONE)
    chunks = _Chunks(outbox, envelope, usage, logprobs=prompt.logprobs is not None)
    choices = ChatChoices.begin(exchange, prompt, lambda index: _StreamedChoice(chunks, index), end)
    return exchange.stream(outbox, characters=len(prompt.text))


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Writes the chunks of one response. usage: returns JSON that a chunk has for it. logprobs: they were asked for."""

    outbox: Outbox
    envelope: Envelope
    usage: Callable[[], str | None]
    logprobs: bool

    def write(self, index: int, delta: str, logprobs: Sequence[str], reason: str | None) -> None:
        """Writes a chunk with the next piece of a choice. delta, logprobs: JSON."""
        entries = f'{{"content":[{",".join(logprobs)}]}}' if self.logprobs else "null"
        told = "null" if reason is None else f'"{reason}"'
        choice = f'{{"index":{index},"delta":{delta},"logprobs":{entries},"finish_reason":{told}}}'
        self.outbox.write(event(self.envelope.wrap(choice, self.usage())))


@dataclass(slots=True)
class _StreamedChoice:
    """Writes the pieces of one choice."""

    chunks: _Chunks
    index: int
    begun: bool = False

    def piece(self, piece: Piece, logprobs: Sequence[str], reason: str | None) -> None:
        self.chunks.write(self.index, delta_json(piece, first=not self.begun), logprobs, reason)
        self.begun = True
