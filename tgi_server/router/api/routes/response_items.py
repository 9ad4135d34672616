"""The items of a response: built from the pieces of an answer, and sent as events meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tgi_server.router.api.routes.chat_answer import call_id
from tgi_server.router.api.stored_responses import new_id
from tgi_server.router.schemas.chat import ChatCompletionLogprob
from tgi_server.router.schemas.responses import (
    OutputFunctionCall,
    OutputMessageItem,
    OutputReasoning,
    OutputText,
    ReasoningText,
)
from tgi_server.router.text.answer_reader import AnswerPart, Piece

# Sends an event, given its type and its members.
Emit = Callable[[str, dict[str, Any]], None]

_KINDS = {
    AnswerPart.TEXT: "message",
    AnswerPart.THOUGHT: "reasoning",
    AnswerPart.CALL: "function_call",
    AnswerPart.ARGUMENTS: "function_call",
}
# What each kind is written as: the kind of id, and the events of its pieces.
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True)
class ResponseItem:
    """An item of a response.

    name, call_id: of a function call, whose arguments are the text.
    """

    kind: str
    id: str
    name: str = ""
    call_id: str = ""
    status: str = "in_progress"
    text: str = ""
    logprobs: list[ChatCompletionLogprob] = field(default_factory=list)

    def shown(self) -> OutputMessageItem | OutputReasoning | OutputFunctionCall:
        """Returns the item as it is sent, without content while it is in progress."""
        if self.kind == "function_call":
            return OutputFunctionCall(
                id=self.id, status=self.status, call_id=self.call_id, name=self.name, arguments=self.text
            )
        begun = self.status == "in_progress"
        if self.kind == "reasoning":
            return OutputReasoning(
                id=self.id, status=self.status, content=[] if begun else [ReasoningText(text=self.text)]
            )
        return OutputMessageItem(id=self.id, status=self.status, content=[] if begun else [self.text_part()])

    def text_part(self) -> OutputText:
        """Returns the text of a message."""
        return OutputText(text=self.text, logprobs=self.logprobs)


class ResponseItems:
    """Collects the items of one response. reason: why the answer ended, once it has. incomplete: it was cut off, by its
    length, or by a stop sequence within a call. thoughts: pieces of these.
    """

    def __init__(self, emit: Emit) -> None:
        self.items: list[ResponseItem] = []
        self.reason: str | None = None
        self.incomplete = False
        self.thoughts = 0
        self._emit = emit
        self._open: ResponseItem | None = None
        self._pieces: list[str] = []
        self._logprobs: list[ChatCompletionLogprob] = []

    def shown(self) -> list[OutputMessageItem | OutputReasoning | OutputFunctionCall]:
        """Returns the items as they are sent."""
        return [item.shown() for item in self.items]

    def piece(self, piece: Piece, logprobs: Sequence[ChatCompletionLogprob], reason: str | None) -> None:
        if piece.text or piece.part is AnswerPart.CALL or not self.items:
            self._take(piece, logprobs)
        else:
            self._logprobs += logprobs
        if reason is not None:
            in_call = self._open is not None and self._open.kind == "function_call"
            self.reason, self.incomplete = reason, reason == "length" or (in_call and reason != "tool_calls")
            self._close("incomplete" if self.incomplete else "completed")

    def _take(self, piece: Piece, logprobs: Sequence[ChatCompletionLogprob]) -> None:
        kind = _KINDS[piece.part]
        if piece.part is AnswerPart.CALL or self._open is None or self._open.kind != kind:
            self._close("completed")
            self._open = self._begin(kind, piece)
        self.thoughts += piece.part is AnswerPart.THOUGHT
        if piece.part is not AnswerPart.CALL and piece.text:
            self._pieces.append(piece.text)
            entries = {"logprobs": list(logprobs)} if kind == "message" else {}
            self._emit(f"{_EVENTS[kind]}.delta", {**self._place(self._open), "delta": piece.text, **entries})
        self._logprobs += logprobs

    def _begin(self, kind: str, piece: Piece) -> ResponseItem:
        item = ResponseItem(kind, new_id(_IDS[kind]))
        if kind == "function_call":
            item.name, item.call_id = piece.text, piece.id or call_id()
        self._pieces, self._logprobs = [], []
        self.items.append(item)
        self._emit("response.output_item.added", {"output_index": len(self.items) - 1, "item": item.shown()})
        if kind == "message":
            self._emit("response.content_part.added", {**self._place(item), "part": item.text_part()})
        return item

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        item.status, item.text = status, "".join(self._pieces)
        place, done = self._place(item), f"{_EVENTS[item.kind]}.done"
        if item.kind == "function_call":
            self._emit(done, {**place, "name": item.name, "arguments": item.text})
        elif item.kind == "reasoning":
            self._emit(done, {**place, "text": item.text})
        else:
            item.logprobs = self._logprobs
            self._emit(done, {**place, "text": item.text, "logprobs": item.logprobs})
            self._emit("response.content_part.done", {**place, "part": item.text_part()})
        self._emit("response.output_item.done", {"output_index": len(self.items) - 1, "item": item.shown()})

    def _place(self, item: ResponseItem) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self.items) - 1}
        return place if item.kind == "function_call" else {**place, "content_index": 0}
