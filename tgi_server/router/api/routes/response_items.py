"""The items of a response: made of the pieces of an answer, and told as events while it comes."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from tgi_server.router.api.routes.chat_answer import call_id
from tgi_server.router.api.stored_responses import new_id
from tgi_server.router.text.answer_reader import AnswerPart, Piece

# Takes the type of an event, and its members.
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


class ResponseItems:
    """Collects the items of one response. reason: why the answer ended, once it has. incomplete: it was cut off, by its
    length, or by a stop sequence within a call. thoughts: pieces of these.
    """

    def __init__(self, emit: Emit) -> None:
        self.items: list[dict[str, Any]] = []
        self.reason: str | None = None
        self.incomplete = False
        self.thoughts = 0
        self._emit = emit
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._logprobs: list[Any] = []

    def piece(self, piece: Piece, logprobs: Sequence[str], reason: str | None) -> None:
        told = [json.loads(entry) for entry in logprobs]
        if piece.text or piece.part is AnswerPart.CALL or not self.items:
            self._take(piece, told)
        else:
            self._logprobs += told
        if reason is not None:
            in_call = self._open is not None and self._open["type"] == "function_call"
            self.reason, self.incomplete = reason, reason == "length" or (in_call and reason != "tool_calls")
            self._close("incomplete" if self.incomplete else "completed")

    def _take(self, piece: Piece, logprobs: list[Any]) -> None:
        kind = _KINDS[piece.part]
        if piece.part is AnswerPart.CALL or self._open is None or self._open["type"] != kind:
            self._close("completed")
            self._begin(kind, piece)
        self.thoughts += piece.part is AnswerPart.THOUGHT
        if piece.part is not AnswerPart.CALL and piece.text:
            self._pieces.append(piece.text)
            told = {"logprobs": logprobs} if kind == "message" else {}
            self._emit(f"{_EVENTS[kind]}.delta", {**self._place(), "delta": piece.text, **told})
        self._logprobs += logprobs

    def _begin(self, kind: str, piece: Piece) -> None:
        item: dict[str, Any] = {"type": kind, "id": new_id(_IDS[kind]), "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"call_id": call_id(), "name": piece.text, "arguments": ""}
        self._open, self._pieces, self._logprobs = item, [], []
        self.items.append(item)
        self._emit("response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})
        if kind == "message":
            self._emit("response.content_part.added", {**self._place(), "part": _text_part("", [])})

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        text, place, kind = "".join(self._pieces), self._place(item), item["type"]
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            self._emit(f"{_EVENTS[kind]}.done", {**place, "name": item["name"], "arguments": text})
        elif kind == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            self._emit(f"{_EVENTS[kind]}.done", {**place, "text": text})
        else:
            part = _text_part(text, self._logprobs)
            item["content"] = [part]
            self._emit(f"{_EVENTS[kind]}.done", {**place, "text": text, "logprobs": self._logprobs})
            self._emit("response.content_part.done", {**place, "part": part})
        self._emit("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})

    def _place(self, item: dict[str, Any] | None = None) -> dict[str, Any]:
        item = item or self._open
        assert item is not None
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return place if item["type"] == "function_call" else {**place, "content_index": 0}


def _text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
