"""One choice of a chat response: parsing its tokens into pieces, and collecting or converting the pieces."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol
from uuid import uuid4

from msgspec import UNSET
from pydantic_core import from_json

from tgi_server.contract import FinishReason
from tgi_server.router.answers.free_form import free_form_input
from tgi_server.router.answers.reader import AnswerPart, AnswerReader, Piece
from tgi_server.router.answers.tools import ClientTool, ToolKind
from tgi_server.router.api.encoding import known_logprob
from tgi_server.router.api.routes.openai import finish_reason
from tgi_server.router.schemas.chat import (
    CalledFreeFormTool,
    CalledFunction,
    ChatCompletionComplete,
    ChatCompletionLogprob,
    ChatCompletionLogprobs,
    ChatCompletionTopLogprob,
    DeltaToolCall,
    FreeFormPiece,
    Function,
    MadeToolCall,
    ReasoningDelta,
    TextDelta,
    TextMessage,
    ToolCallDelta,
    ToolCallMessage,
)
from tgi_server.router.text.token_stream import AnyStream
from tgi_server.router.text.tokenizer import TextTokenizer


class PieceWriter(Protocol):
    """Writes the pieces of a choice."""

    def piece(self, piece: Piece, logprobs: Sequence[ChatCompletionLogprob], reason: str | None) -> None:
        """Writes the next piece.

        logprobs: log-probabilities of the tokens since the last piece. reason: the finish reason, with the last piece.
        """


class ChatAnswer:
    """A formatter that parses the tokens of one choice into pieces. Tokens without text belong to the next piece.

    token_ids: the tokens, until the caller takes them; None: they are not kept.
    """

    __slots__ = ("_logprobs", "_most", "_reader", "_show_thoughts", "_tokenizer", "token_ids", "writer")

    def __init__(
        self,
        reader: AnswerReader | None,
        writer: PieceWriter,
        tokenizer: TextTokenizer,
        most: int | None,
        *,
        show_thoughts: bool = True,
        token_ids: bool = False,
    ) -> None:
        """reader: parses thoughts and calls; None: the whole answer is text. most: number of alternatives reported for
        each token; None: no log-probabilities are reported. show_thoughts: False drops thoughts. token_ids: True keeps
        the tokens.
        """
        self.writer = writer
        self._reader = reader
        self._tokenizer = tokenizer
        self._most = most
        self._show_thoughts = show_thoughts
        self._logprobs: list[ChatCompletionLogprob] = []
        self.token_ids: list[int] | None = [] if token_ids else None

    def token(self, stream: AnyStream) -> bool:
        if self.token_ids is not None:
            self.token_ids.append(stream.token_id)
        if self._most is not None:
            self._logprobs.append(_logprobs(self._tokenizer, self._most, stream))
        if stream.visible or stream.finish_reason is not None:
            self._take(stream, stream.visible)
        return self._reader is not None and self._reader.repeated

    def rest(self, stream: AnyStream, text: str) -> None:
        self._take(stream, text)

    def _take(self, stream: AnyStream, visible: str) -> None:
        ended = stream.finish_reason
        if self._reader is None:
            pieces = [Piece(AnswerPart.TEXT, visible)]
        else:
            thinking = self._reader.thinking
            pieces = [*self._reader.feed(visible), *(self._reader.end() if ended is not None else ())]
            if not self._show_thoughts:
                pieces = self._without_thoughts(pieces, thinking=thinking)
            if ended is not None and not pieces:
                calls = self._reader.calls
                pieces = [Piece(AnswerPart.ARGUMENTS, "", calls - 1) if calls else Piece(AnswerPart.TEXT, "")]
        for place, piece in enumerate(pieces, 1):
            last = ended is not None and place == len(pieces)
            self.writer.piece(piece, self._logprobs, self._reason(ended) if last else None)
            self._logprobs = []

    def _without_thoughts(self, pieces: list[Piece], *, thinking: bool) -> list[Piece]:
        """Returns the pieces that are not thoughts, and drops the log-probabilities of the thoughts' tokens.

        thinking: True if a thought had begun before these pieces.
        """
        assert self._reader is not None
        others = [piece for piece in pieces if piece.part is not AnswerPart.THOUGHT]
        if thinking or self._reader.thinking or len(others) < len(pieces):
            # Only the last token may belong to the text after the thoughts.
            self._logprobs = self._logprobs[-1:] if others else []
        return others

    def _reason(self, reason: FinishReason | None) -> str | None:
        """Returns OpenAI's finish reason: `tool_calls` if there are calls, unless the answer was cut off.

        It was cut off if it reached its length or deadline, or ended within a call.
        """
        if reason is None:
            return None
        called = self._reader is not None and self._reader.calls and not self._reader.in_arguments
        cut_off = reason in (FinishReason.LENGTH, FinishReason.DEADLINE)
        return "tool_calls" if called and not cut_off else finish_reason(reason)


class FreeFormCalls:
    """Passes pieces on. For tools whose input is text, the arguments are replaced by that text, in one piece."""

    def __init__(self, writer: PieceWriter, tools: Mapping[str, ClientTool]) -> None:
        """tools: the request's tools, by the names that the model sees."""
        self._writer = writer
        self._names = {name for name, tool in tools.items() if tool.kind is ToolKind.FREE_FORM}
        self._call: int | None = None
        self._arguments: list[str] = []
        self._logprobs: list[ChatCompletionLogprob] = []

    def piece(self, piece: Piece, logprobs: Sequence[ChatCompletionLogprob], reason: str | None) -> None:
        if self._call is not None and piece.part is AnswerPart.ARGUMENTS:
            self._arguments.append(piece.text)
            self._logprobs += logprobs
            if reason is not None:
                self._end(reason)
            return
        if self._call is not None:
            self._end(None)
        if piece.part is AnswerPart.CALL and piece.text in self._names:
            self._call = piece.call
        self._writer.piece(piece, logprobs, reason)

    def _end(self, reason: str | None) -> None:
        assert self._call is not None
        text = free_form_input("".join(self._arguments))
        self._writer.piece(Piece(AnswerPart.ARGUMENTS, text, self._call), self._logprobs, reason)
        self._call, self._arguments, self._logprobs = None, [], []


class WholeChoice:
    """Collects the pieces of a choice."""

    def __init__(self, tools: Mapping[str, ClientTool] = MappingProxyType({})) -> None:
        """tools: the tools whose input is text, by name."""
        self._tools = tools
        self._texts: dict[AnswerPart, list[str]] = {part: [] for part in AnswerPart}
        self._arguments: list[list[str]] = []
        self._ids: list[str] = []
        self._logprobs: list[ChatCompletionLogprob] = []
        self._reason = ""

    def piece(self, piece: Piece, logprobs: Sequence[ChatCompletionLogprob], reason: str | None) -> None:
        self._logprobs += logprobs
        self._texts[piece.part].append(piece.text)
        if piece.part is AnswerPart.CALL:
            self._arguments.append([])
            self._ids.append(piece.id)
        elif piece.part is AnswerPart.ARGUMENTS:
            self._arguments[piece.call].append(piece.text)
        if reason is not None:
            self._reason = reason

    @property
    def text(self) -> str:
        return "".join(self._texts[AnswerPart.TEXT])

    @property
    def thoughts(self) -> str:
        return "".join(self._texts[AnswerPart.THOUGHT])

    @property
    def finish_reason(self) -> str:
        return self._reason

    @property
    def logprobs(self) -> list[ChatCompletionLogprob]:
        return self._logprobs

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """The calls: name, arguments as JSON, and the id that the model gave; empty if it gave none."""
        arguments = map("".join, self._arguments)
        return list(zip(self._texts[AnswerPart.CALL], arguments, self._ids, strict=True))

    def complete(self, index: int, *, logprobs: bool) -> ChatCompletionComplete:
        """Returns the complete choice. logprobs: True if they were requested."""
        thoughts = self.thoughts or UNSET
        calls = [self._made(*call) for call in self.calls]
        message: TextMessage | ToolCallMessage = TextMessage(content=self.text, reasoning_content=thoughts)
        if calls:
            message = ToolCallMessage(content=self.text or None, reasoning_content=thoughts, tool_calls=calls)
        entries = ChatCompletionLogprobs(content=self._logprobs) if logprobs else None
        return ChatCompletionComplete(index=index, message=message, logprobs=entries, finish_reason=self._reason)

    def _made(self, name: str, arguments: str, own: str) -> MadeToolCall:
        if name in self._tools:
            custom = CalledFreeFormTool(name=name, input=arguments)
            return MadeToolCall(id=own or call_id(), type="custom", custom=custom)
        return MadeToolCall(id=own or call_id(), function=CalledFunction(name=name, arguments=arguments))


def made_arguments(arguments: str) -> Any:
    """Parses the arguments of a call; if the call was cut off, as much as there is."""
    return from_json(arguments, allow_partial="trailing-strings") if arguments.strip() else {}


def call_id() -> str:
    """Returns a new id for a call."""
    return f"call_{uuid4().hex[:24]}"


Delta = TextDelta | ReasoningDelta | ToolCallDelta


def delta_of(piece: Piece, *, first: bool, free_form: bool = False) -> Delta:
    """Returns a piece as the `delta` of a chunk.

    first: True for the first piece of a choice, which has the role. free_form: True if the piece belongs to a call of a
    tool whose input is text.
    """
    role = "assistant" if first else UNSET
    match piece.part:
        case AnswerPart.TEXT:
            return TextDelta(role=role, content=piece.text)
        case AnswerPart.THOUGHT:
            return ReasoningDelta(role=role, reasoning_content=piece.text)
        case AnswerPart.CALL if free_form:
            custom = FreeFormPiece(name=piece.text, input="")
            call = DeltaToolCall(index=piece.call, id=piece.id or call_id(), type="custom", custom=custom)
        case AnswerPart.ARGUMENTS if free_form:
            call = DeltaToolCall(index=piece.call, custom=FreeFormPiece(input=piece.text))
        case AnswerPart.CALL:
            function = Function(name=piece.text, arguments="")
            call = DeltaToolCall(index=piece.call, id=piece.id or call_id(), type="function", function=function)
        case AnswerPart.ARGUMENTS:
            call = DeltaToolCall(index=piece.call, function=Function(arguments=piece.text))
    return ToolCallDelta(role=role, tool_calls=[call])


def _logprobs(tokenizer: TextTokenizer, most: int, stream: AnyStream) -> ChatCompletionLogprob:
    """Returns the entry of the last token for `logprobs.content`. The member `drafted` is not in OpenAI's API.

    most: maximum number of alternatives, as shards report more if some are equally likely.
    """
    token_id, top = stream.token_id, stream.top
    tops = [] if top is None else list(zip(top.ids, top.logprobs, strict=True))
    # Among equally likely tokens, the chosen one comes first.
    tops.sort(key=lambda each: (-each[1], each[0] != token_id))
    return ChatCompletionLogprob(
        token=tokenizer.token_name(token_id),
        logprob=known_logprob(stream.logprob),
        bytes=list(tokenizer.token_bytes(token_id)),
        top_logprobs=[
            ChatCompletionTopLogprob(
                token=tokenizer.token_name(each), logprob=known_logprob(value), bytes=list(tokenizer.token_bytes(each))
            )
            for each, value in tops[:most]
        ],
        drafted=stream.drafted or UNSET,
    )
