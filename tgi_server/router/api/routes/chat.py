"""/v1/chat/completions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.routing import Route

from shared.partial_json import MemberReader
from tgi_server.router.answers.reader import AnswerPart, Piece
from tgi_server.router.answers.tools import ClientTool
from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import OPENAI_ERRORS
from tgi_server.router.api.encoding import event
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.generation import AllEnded, RequestGeneration
from tgi_server.router.api.routes.chat_answer import (
    ChatAnswer,
    Delta,
    FreeFormCalls,
    PieceWriter,
    WholeChoice,
    delta_of,
)
from tgi_server.router.api.routes.chat_prompt import prepare_chat, requested_chat
from tgi_server.router.api.routes.openai import DONE, envelope, usage_of, wants_members
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.chat import (
    ChatCompletion,
    ChatCompletionChoice,
    ChatCompletionChunk,
    ChatCompletionLogprob,
    ChatCompletionLogprobs,
    ChatRequest,
    TextDelta,
)
from tgi_server.router.schemas.openai import CompletedMember, Usage
from tgi_server.router.service import Service
from tgi_server.router.submission import PreparedRequest
from tgi_server.router.text.conversation import Conversation
from tgi_server.router.text.token_stream import OnEnd, TokenStream


def chat_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, OPENAI_ERRORS)
    summary = "Answer a conversation, in one piece or as server-sent events"
    routes.receive("/v1/chat/completions", summary, ChatRequest, answer_chat, ChatCompletion, ChatCompletionChunk)
    return routes


async def answer_chat(admission: Admission, request: ChatRequest) -> Response:
    """Responds with the next message of a conversation."""
    conversation, prepared = await prepare_chat(admission, Dialect.CHAT, lambda: requested_chat(admission, request))
    admission.reserve(prepared.options.n - 1)
    generation = RequestGeneration(admission)
    if request.stream:
        return _stream(generation, request, conversation, prepared)
    return await _whole(generation, request, conversation, prepared)


@dataclass(frozen=True, slots=True)
class ChatChoices:
    """The choices of one request while they are generated."""

    generation: RequestGeneration
    prepared: PreparedRequest
    streams: Sequence[TokenStream[ChatAnswer]]

    @classmethod
    def begin(
        cls,
        generation: RequestGeneration,
        conversation: Conversation,
        prepared: PreparedRequest,
        writer: Callable[[int], PieceWriter],
        on_end: OnEnd,
        *,
        token_ids: bool = False,
    ) -> "ChatChoices":
        """Starts to generate the choices.

        writer: creates the writer of the choice with an index. on_end: called at the end of each choice. token_ids:
        True keeps the tokens of each choice.
        """
        service, tools = generation.service, conversation.use.client_tools
        streams = [
            generation.begin(
                sequence,
                ChatAnswer(
                    None if prepared.reader is None else prepared.reader(),
                    FreeFormCalls(writer(index), tools) if tools else writer(index),
                    service.text.tokenizer,
                    prepared.logprobs,
                    show_thoughts=conversation.show_thoughts,
                    token_ids=token_ids,
                ),
                on_end,
                shown=service.text.answer_form.shown,
            )
            for index, sequence in enumerate(prepared.times(prepared.options.n))
        ]
        return cls(generation, prepared, streams)

    def usage(self, *, explained: bool = False) -> Usage:
        """Returns the usage of all choices; their common prompt counts once. explained: True explains cache misses."""
        miss = self.generation.miss if explained else None
        return usage_of(len(self.prepared.input_ids), self.streams, self.streams[0].cached_tokens, miss)


async def _whole(
    generation: RequestGeneration, request: ChatRequest, conversation: Conversation, prepared: PreparedRequest
) -> Response:
    number = prepared.options.n
    end = AllEnded(number)
    written = [WholeChoice(conversation.use.client_tools) for _ in range(number)]
    token_ids = request.return_token_ids
    choices = ChatChoices.begin(generation, conversation, prepared, written.__getitem__, end, token_ids=token_ids)
    await end.future
    logprobs = prepared.logprobs is not None
    completion = ChatCompletion(
        object="chat.completion",
        choices=[choice.complete(index, logprobs=logprobs) for index, choice in enumerate(written)],
        usage=choices.usage(explained=request.explain_prefix),
        **envelope("chatcmpl", generation.service.model, prepared.options.adapter_id),
    )
    if request.return_token_ids:
        completion.prompt_token_ids = prepared.input_ids
        for choice, stream in zip(completion.choices, choices.streams, strict=True):
            choice.token_ids = stream.output.token_ids or []
    return generation.respond(completion, characters=prepared.characters, streams=choices.streams)


def _stream(
    generation: RequestGeneration, request: ChatRequest, conversation: Conversation, prepared: PreparedRequest
) -> Response:
    options = request.stream_options
    whole_usage = options is not None and options.include_usage
    usage_so_far = options is not None and options.include_usage and options.continuous_usage_stats
    outbox = Outbox()
    chunk = ChatCompletionChunk(
        object="chat.completion.chunk",
        choices=[],
        usage=None if whole_usage else UNSET,
        prompt_token_ids=prepared.input_ids if request.return_token_ids else UNSET,
        **envelope("chatcmpl", generation.service.model, prepared.options.adapter_id),
    )

    def last_words() -> bytes:
        chunk.choices, chunk.usage = [], choices.usage(explained=request.explain_prefix)
        return event(chunk) if whole_usage else b""

    def usage() -> Usage:
        return choices.usage()

    def token_ids(index: int) -> list[int]:
        answer = choices.streams[index].output
        ids, answer.token_ids = answer.token_ids, []
        return ids or []

    end = generation.stream_end(outbox, sequences=prepared.options.n, last_words=last_words, trailer=DONE)
    chunks = _Chunks(
        outbox,
        chunk,
        usage if usage_so_far else None,
        token_ids if request.return_token_ids else None,
        logprobs=prepared.logprobs is not None,
    )
    choices = ChatChoices.begin(
        generation,
        conversation,
        prepared,
        lambda index: _StreamedChoice(
            chunks, index, conversation.use.client_tools, MemberReader() if wants_members(request) else None
        ),
        end,
        token_ids=request.return_token_ids,
    )
    return generation.stream(outbox, characters=prepared.characters)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Writes the chunks of one response: `chunk`, each time with another choice.

    usage: returns the usage so far for each chunk; None: chunks have none. token_ids: returns the tokens of a choice
    since its last chunk; None: not requested. logprobs: True if requested.
    """

    outbox: Outbox
    chunk: ChatCompletionChunk
    usage: Callable[[], Usage] | None
    token_ids: Callable[[int], list[int]] | None
    logprobs: bool

    def write(
        self,
        index: int,
        delta: Delta,
        logprobs: Sequence[ChatCompletionLogprob],
        reason: str | None,
        member: CompletedMember | UnsetType = UNSET,
    ) -> None:
        """Writes a chunk with the next piece of a choice, or with a completed member of its JSON."""
        entries = ChatCompletionLogprobs(content=list(logprobs)) if self.logprobs else None
        choice = ChatCompletionChoice(index=index, delta=delta, logprobs=entries, finish_reason=reason, member=member)
        if self.token_ids is not None:
            choice.token_ids = self.token_ids(index)
        self.chunk.choices = [choice]
        if self.usage is not None:
            self.chunk.usage = self.usage()
        self.outbox.write(event(self.chunk))
        self.chunk.prompt_token_ids = UNSET


@dataclass(slots=True)
class _StreamedChoice:
    """Writes the pieces of one choice. members: finds completed members of its JSON; None: they are not sent."""

    chunks: _Chunks
    index: int
    tools: Mapping[str, ClientTool]
    members: MemberReader | None = None
    begun: bool = False
    free_form: bool = False  # True if the last call is of a tool whose input is text

    def piece(self, piece: Piece, logprobs: Sequence[ChatCompletionLogprob], reason: str | None) -> None:
        if piece.part is AnswerPart.CALL:
            self.free_form = piece.text in self.tools
        delta = delta_of(piece, first=not self.begun, free_form=self.free_form)
        members = self.members.read(piece.text) if self.members and piece.part is AnswerPart.TEXT else []
        self.chunks.write(self.index, delta, logprobs, None if members else reason)
        for place, member in enumerate(members, 1):
            last = reason if place == len(members) else None
            self.chunks.write(self.index, TextDelta(content=""), (), last, CompletedMember.of(member))
        self.begun = True
