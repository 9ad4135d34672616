"""/v1/messages and /v1/messages/count_tokens of Anthropic's API."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from uuid import uuid4

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_server.contract import FinishReason
from tgi_server.router.answers.reader import AnswerPart, Piece
from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import ANTHROPIC_ERRORS
from tgi_server.router.api.encoding import named_event
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.generation import AllEnded, RequestGeneration
from tgi_server.router.api.routes.chat import ChatChoices
from tgi_server.router.api.routes.chat_answer import WholeChoice, made_arguments
from tgi_server.router.api.routes.chat_prompt import prepare_chat, rendered
from tgi_server.router.api.routes.context_edits import ContextEdits
from tgi_server.router.api.routes.messages_request import conversation_of, requested_message
from tgi_server.router.api.routes.tokenize import encoded, token_count
from tgi_server.router.api.values import respond_with_tokens
from tgi_server.router.errors import NotSupported
from tgi_server.router.option_reader import Given
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.chat import ChatCompletionLogprob
from tgi_server.router.schemas.context_management import AppliedEdits, OriginalTokens
from tgi_server.router.schemas.messages import (
    BlockDelta,
    BlockPiece,
    BlockStart,
    BlockStop,
    CountedTokens,
    CountTokensRequest,
    MessageChange,
    MessageEnd,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessagesUsage,
    Ping,
    SentMessage,
    SentText,
    SentThinking,
    SentToolUse,
)
from tgi_server.router.service import Service
from tgi_server.router.submission import PreparedRequest
from tgi_server.router.text.conversation import Conversation

_STOP_REASONS = {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.DEADLINE: "max_tokens",
    FinishReason.EOS_TOKEN: "end_turn",
    FinishReason.STOP_SEQUENCE: "stop_sequence",
}
_PING = named_event("ping", Ping())


def message_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, ANTHROPIC_ERRORS)
    summary = "Answer a conversation, in one piece or as server-sent events, for Anthropic's clients"
    routes.receive("/v1/messages", summary, MessagesRequest, _answer, SentMessage, "MessageEvent")
    summary = "The number of tokens that a conversation becomes"
    routes.receive("/v1/messages/count_tokens", summary, CountTokensRequest, _count, CountedTokens)

    async def batches(_: Request) -> Response:
        raise NotSupported("message batches are not supported here; send each request to /v1/messages")

    paths = ("/v1/messages/batches", "/v1/messages/batches/{rest:path}")
    return [*routes, *(Route(path, batches, methods=["GET", "POST", "DELETE"]) for path in paths)]


async def _count(admission: Admission, request: CountTokensRequest) -> Response:
    service = admission.service
    edits = ContextEdits(service, request.context_management)
    prompt = await rendered(admission, lambda: edits.apply(conversation_of(request)))
    tokens = await encoded(service, prompt, token_count, add_special_tokens=False)
    counted = CountedTokens(input_tokens=tokens)
    if edits.report is not None:
        counted.context_management = OriginalTokens(original_input_tokens=tokens + edits.saved_tokens)
    return await respond_with_tokens(admission, counted, tokens)


async def _answer(admission: Admission, request: MessagesRequest) -> Response:
    service = admission.service
    edits = ContextEdits(service, request.context_management)
    asked = partial(requested_message, admission, request, edits)
    conversation, prepared = await prepare_chat(admission, Dialect.MESSAGES, asked)
    applied = UNSET if edits.report is None else edits.report
    if request.stream:
        return _stream(RequestGeneration(admission), conversation, prepared, applied)
    empty = Given.by(request, Dialect.MESSAGES).values["max_new_tokens"] == 0
    return await _whole(RequestGeneration(admission), conversation, prepared, applied, empty=empty)


async def _whole(
    generation: RequestGeneration,
    conversation: Conversation,
    prepared: PreparedRequest,
    applied: AppliedEdits | UnsetType,
    *,
    empty: bool,
) -> Response:
    """Responds in one piece. empty: True for a request for 0 tokens: the one computed with the prompt is left out."""
    end, written = AllEnded(1), WholeChoice()
    choices = ChatChoices.begin(generation, conversation, prepared, lambda _: written, end)
    await end.future
    message = _message(generation.service, choices)
    message.context_management = applied
    if empty:
        message.stop_reason, message.usage.output_tokens = "max_tokens", 0
    else:
        message.content = _blocks(written)
        ending = _ending(generation.service, choices, called=written.finish_reason == "tool_calls")
        message.stop_reason, message.stop_sequence = ending.stop_reason, ending.stop_sequence
    return generation.respond(message, characters=prepared.characters, streams=choices.streams)


def _blocks(written: WholeChoice) -> list[SentThinking | SentText | SentToolUse]:
    blocks: list[SentThinking | SentText | SentToolUse] = []
    if written.thoughts:
        blocks.append(SentThinking(thinking=written.thoughts, signature=_signature(_digest(written.thoughts))))
    if written.text:
        blocks.append(SentText(text=written.text))
    for name, arguments, own in written.calls:
        blocks.append(SentToolUse(id=own or _tool_use_id(), name=name, input=made_arguments(arguments)))
    return blocks


def _stream(
    generation: RequestGeneration,
    conversation: Conversation,
    prepared: PreparedRequest,
    applied: AppliedEdits | UnsetType,
) -> Response:
    outbox = Outbox(_PING)

    def start() -> SentMessage:
        return _message(generation.service, choices)

    def last_words() -> bytes:
        ending = _ending(generation.service, choices, called=events.reason == "tool_calls")
        events.end(MessageChange(delta=ending, usage=_usage(choices), context_management=applied))
        return b""

    events = _MessageEvents(outbox, start)
    end = generation.stream_end(outbox, last_words=last_words)
    choices = ChatChoices.begin(generation, conversation, prepared, lambda _: events, end)
    return generation.stream(outbox, characters=prepared.characters)


class _MessageEvents:
    """Writes the events of one message: its start, its blocks one after the other, and its end.

    reason: the finish reason of the answer; None until it has ended.
    """

    def __init__(self, outbox: Outbox, start: Callable[[], SentMessage]) -> None:
        """start: returns the message without content; called when the first piece has come."""
        self._outbox = outbox
        self._start = start
        self._index = -1
        self._open: tuple[AnswerPart, int] | None = None
        self._thoughts = _digest()
        self.reason: str | None = None

    def piece(self, piece: Piece, logprobs: Sequence[ChatCompletionLogprob], reason: str | None) -> None:
        if self._index < 0 and self._open is None:
            self._begin_message()
        if piece.part is AnswerPart.CALL:
            self._begin(piece, SentToolUse(id=piece.id or _tool_use_id(), name=piece.text, input={}))
        elif piece.text:
            self._write(piece)
        if reason is not None:
            self.reason = reason

    def _begin_message(self) -> None:
        self._send(MessageStart(message=self._start()))
        self._outbox.write(_PING)
        self._index = 0

    def _begin(self, piece: Piece, block: SentText | SentThinking | SentToolUse) -> None:
        self._close()
        part = AnswerPart.ARGUMENTS if piece.part is AnswerPart.CALL else piece.part
        self._open = (part, piece.call)
        self._send(BlockStart(index=self._index, content_block=block))

    def _write(self, piece: Piece) -> None:
        begun: SentText | SentThinking | None
        match piece.part:
            case AnswerPart.TEXT:
                begun, delta = SentText(text=""), BlockDelta(type="text_delta", text=piece.text)
            case AnswerPart.THOUGHT:
                begun, delta = SentThinking(thinking=""), BlockDelta(type="thinking_delta", thinking=piece.text)
            case _:
                begun, delta = None, BlockDelta(type="input_json_delta", partial_json=piece.text)
        if begun is not None and (self._open is None or self._open[0] is not piece.part):
            self._begin(piece, begun)
        if piece.part is AnswerPart.THOUGHT:
            self._thoughts.update(piece.text.encode())
        self._send(BlockPiece(index=self._index, delta=delta))

    def _close(self) -> None:
        if self._open is not None:
            if self._open[0] is AnswerPart.THOUGHT:
                signature = _signature(self._thoughts)
                self._send(BlockPiece(index=self._index, delta=BlockDelta(type="signature_delta", signature=signature)))
                self._thoughts = _digest()
            self._send(BlockStop(index=self._index))
            self._index += 1
            self._open = None

    def end(self, change: MessageChange) -> None:
        """Writes the end of the message."""
        self._close()
        self._send(change)
        self._send(MessageStop())

    def _send(self, event: MessageStart | BlockStart | BlockPiece | BlockStop | MessageChange | MessageStop) -> None:
        self._outbox.write(named_event(event.type, event))


def _message(service: Service, choices: ChatChoices) -> SentMessage:
    """Returns the message without content."""
    model = choices.prepared.options.adapter_id or service.model.names[0]
    return SentMessage(id=f"msg_{uuid4().hex}", model=model, usage=_usage(choices))


def _usage(choices: ChatChoices) -> MessagesUsage:
    (stream,) = choices.streams
    return MessagesUsage(
        input_tokens=stream.input_length - stream.cached_tokens,
        cache_read_input_tokens=stream.cached_tokens,
        output_tokens=stream.generated_tokens,
    )


def _ending(service: Service, choices: ChatChoices, *, called: bool) -> MessageEnd:
    """Returns the end of the message. called: True if the answer ends with tool calls."""
    (stream,) = choices.streams
    reason = stream.finish_reason
    assert reason is not None
    stopped = stream.stop_sequence if reason is FinishReason.STOP_SEQUENCE else None
    total = stream.input_length + stream.generated_tokens
    if reason is FinishReason.LENGTH and total >= service.limits.max_total_tokens:
        told = "model_context_window_exceeded"
    else:
        told = _STOP_REASONS[reason]
    return MessageEnd(stop_reason="tool_use" if called else told, stop_sequence=stopped)


def _digest(thoughts: str = "") -> blake2b:
    return blake2b(thoughts.encode(), digest_size=24)


def _signature(thoughts: blake2b) -> str:
    """Returns the signature of a block of thoughts. Clients keep only blocks with a signature, and send them back."""
    return b64encode(thoughts.digest()).decode()


def _tool_use_id() -> str:
    return f"toolu_{uuid4().hex[:24]}"
