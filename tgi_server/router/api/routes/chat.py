"""/v1/chat/completions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tgi_server.router.api.documentation import OPENAI_ERRORS, endpoint
from tgi_server.router.api.encoding import event
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.exchange import AllEnded, DirectRoute, Exchange, respond_to
from tgi_server.router.api.routes.chat_answer import (
    ChatAnswer,
    Delta,
    FreeFormCalls,
    PieceWriter,
    WholeChoice,
    delta_of,
)
from tgi_server.router.api.routes.chat_prompt import ChatPrompt, plan_chat, prompt_for_chat
from tgi_server.router.api.routes.openai import DONE, envelope, usage_of
from tgi_server.router.schemas.chat import (
    ChatCompletion,
    ChatCompletionChoice,
    ChatCompletionChunk,
    ChatCompletionLogprob,
    ChatCompletionLogprobs,
    ChatRequest,
)
from tgi_server.router.schemas.openai import Usage
from tgi_server.router.service import Service
from tgi_server.router.text.answer_reader import AnswerPart, Piece
from tgi_server.router.text.free_form import ClientTool
from tgi_server.router.text.token_stream import OnEnd, TokenStream


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation, in one piece or as server-sent events",
        **endpoint(OPENAI_ERRORS, ChatRequest, ChatCompletion, ChatCompletionChunk),
    )
    async def chat_completions(request: Request) -> Response:
        return await respond_to(service, request, ChatRequest, answer_chat)

    return router


async def answer_chat(exchange: Exchange, request: ChatRequest) -> Response:
    """Responds with the next message of a conversation."""
    service = exchange.service
    prompt = await prompt_for_chat(exchange, lambda: plan_chat(service, request))
    exchange.reserve(prompt.checked.options.n - 1)
    return _stream(exchange, request, prompt) if request.stream else await _whole(exchange, request, prompt)


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
        *,
        token_ids: bool = False,
    ) -> "ChatChoices":
        """writer: makes what writes the choice of that index. on_end: called at the end of each choice. token_ids: keep
        the tokens of each.
        """
        service = exchange.service
        streams = [
            exchange.generate(
                checked,
                ChatAnswer(
                    None if prompt.reader is None else prompt.reader(),
                    FreeFormCalls(writer(index), prompt.client_tools) if prompt.client_tools else writer(index),
                    service.text.tokenizer,
                    prompt.logprobs,
                    show_thoughts=prompt.show_thoughts,
                    token_ids=token_ids,
                ),
                on_end,
                shown=service.text.answer_form.shown,
            )
            for index, checked in enumerate(prompt.checked.times(prompt.checked.options.n))
        ]
        return cls(prompt, streams)

    def usage(self) -> Usage:
        """Returns what the choices have used. The prompt is one for all of them."""
        return usage_of(len(self.prompt.checked.input_ids), self.streams, self.streams[0].cached_tokens)


async def _whole(exchange: Exchange, request: ChatRequest, prompt: ChatPrompt) -> Response:
    number = prompt.checked.options.n
    end = AllEnded(number)
    written = [WholeChoice(prompt.client_tools) for _ in range(number)]
    choices = ChatChoices.begin(exchange, prompt, written.__getitem__, end, token_ids=request.return_token_ids)
    await exchange.wait_for(end.future)
    logprobs = prompt.logprobs is not None
    completion = ChatCompletion(
        object="chat.completion",
        choices=[choice.complete(index, logprobs=logprobs) for index, choice in enumerate(written)],
        usage=choices.usage(),
        **envelope("chatcmpl", exchange.service.model, prompt.checked.options.adapter_id),
    )
    if request.return_token_ids:
        completion.prompt_token_ids = prompt.checked.input_ids
        for choice, stream in zip(completion.choices, choices.streams, strict=True):
            choice.token_ids = stream.output.token_ids or []
    return exchange.respond(completion, characters=len(prompt.text), streams=choices.streams)


def _stream(exchange: Exchange, request: ChatRequest, prompt: ChatPrompt) -> Response:
    options = request.stream_options
    whole_usage = options is not None and options.include_usage
    usage_so_far = options is not None and options.include_usage and options.continuous_usage_stats
    outbox = Outbox()
    chunk = ChatCompletionChunk(
        object="chat.completion.chunk",
        choices=[],
        usage=None if whole_usage else UNSET,
        prompt_token_ids=prompt.checked.input_ids if request.return_token_ids else UNSET,
        **envelope("chatcmpl", exchange.service.model, prompt.checked.options.adapter_id),
    )

    def last_words() -> bytes:
        chunk.choices, chunk.usage = [], choices.usage()
        return event(chunk) if whole_usage else b""

    def usage() -> Usage:
        return choices.usage()

    def token_ids(index: int) -> list[int]:
        answer = choices.streams[index].output
        ids, answer.token_ids = answer.token_ids, []
        return ids or []

    end = exchange.stream_end(outbox, sequences=prompt.checked.options.n, last_words=last_words, trailer=DONE)
    chunks = _Chunks(
        outbox,
        chunk,
        usage if usage_so_far else None,
        token_ids if request.return_token_ids else None,
        logprobs=prompt.logprobs is not None,
    )
    tools = prompt.client_tools
    choices = ChatChoices.begin(
        exchange,
        prompt,
        lambda index: _StreamedChoice(chunks, index, tools),
        end,
        token_ids=request.return_token_ids,
    )
    return exchange.stream(outbox, characters=len(prompt.text))


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Writes the chunks of one response: `chunk` with another choice each time.

    usage: returns what each chunk has for it; None: all have the same. token_ids: returns those since the last chunk of
    a choice; None, like logprobs: they were not requested.
    """

    outbox: Outbox
    chunk: ChatCompletionChunk
    usage: Callable[[], Usage] | None
    token_ids: Callable[[int], list[int]] | None
    logprobs: bool

    def write(self, index: int, delta: Delta, logprobs: Sequence[ChatCompletionLogprob], reason: str | None) -> None:
        """Writes a chunk with the next piece of a choice."""
        entries = ChatCompletionLogprobs(content=list(logprobs)) if self.logprobs else None
        choice = ChatCompletionChoice(index=index, delta=delta, logprobs=entries, finish_reason=reason)
        if self.token_ids is not None:
            choice.token_ids = self.token_ids(index)
        self.chunk.choices = [choice]
        if self.usage is not None:
            self.chunk.usage = self.usage()
        self.outbox.write(event(self.chunk))
        self.chunk.prompt_token_ids = UNSET


@dataclass(slots=True)
class _StreamedChoice:
    """Writes the pieces of one choice."""

    chunks: _Chunks
    index: int
    tools: Mapping[str, ClientTool]
    begun: bool = False
    free_form: bool = False  # the last call

    def piece(self, piece: Piece, logprobs: Sequence[ChatCompletionLogprob], reason: str | None) -> None:
        if piece.part is AnswerPart.CALL:
            self.free_form = piece.text in self.tools
        delta = delta_of(piece, first=not self.begun, free_form=self.free_form)
        self.chunks.write(self.index, delta, logprobs, reason)
        self.begun = True
