"""The items of a response: built from the pieces of an answer, and sent as events meanwhile.

They are written as JSON piece by piece: dumping objects with the log-probabilities of a long answer would hold up the
event loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tgi_server.router.api.responses import quoted
from tgi_server.router.api.routes.chat_answer import call_id
from tgi_server.router.api.stored_responses import new_id
from tgi_server.router.text.answer_reader import AnswerPart, Piece

# Sends an event, given its type and its members as JSON.
Emit = Callable[[str, str], None]

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

    name, call_id: of a function call, whose arguments are the text. logprobs: JSON of the entries, joined by commas.
    """

    kind: str
    id: str
    name: str = ""
    call_id: str = ""
    status: str = "in_progress"
    text: str = ""
    logprobs: str = ""

    def json(self) -> str:
        """Returns the item as JSON, without content while it is in progress."""
        head = f'{{"type":"{self.kind}","id":"{self.id}","status":"{self.status}"'
        begun = self.status == "in_progress"
        if self.kind == "function_call":
            call = f'"call_id":{quoted(self.call_id)},"name":{quoted(self.name)}'
            return f'{head},{call},"arguments":{quoted(self.text)}}}'
        if self.kind == "reasoning":
            content = "" if begun else f'{{"type":"reasoning_text","text":{quoted(self.text)}}}'
            return f'{head},"summary":[],"content":[{content}]}}'
        content = "" if begun else self.text_part()
        return f'{head},"role":"assistant","content":[{content}]}}'

    def text_part(self) -> str:
        """Returns the text of a message as JSON."""
        return f'{{"type":"output_text","text":{quoted(self.text)},"annotations":[],"logprobs":[{self.logprobs}]}}'


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
        self._logprobs: list[str] = []

    def json(self) -> str:
        """Returns the items as JSON, joined by commas."""
        return ",".join(item.json() for item in self.items)

    def piece(self, piece: Piece, logprobs: Sequence[str], reason: str | None) -> None:
        if piece.text or piece.part is AnswerPart.CALL or not self.items:
            self._take(piece, logprobs)
        else:
            self._logprobs += logprobs
        if reason is not None:
            in_call = self._open is not None and self._open.kind == "function_call"
            self.reason, self.incomplete = reason, reason == "length" or (in_call and reason != "tool_calls")
            self._close("incomplete" if self.incomplete else "completed")

    def _take(self, piece: Piece, logprobs: Sequence[str]) -> None:
        kind = _KINDS[piece.part]
        if piece.part is AnswerPart.CALL or self._open is None or self._open.kind != kind:
            self._close("completed")
            self._open = self._begin(kind, piece)
        self.thoughts += piece.part is AnswerPart.THOUGHT
        if piece.part is not AnswerPart.CALL and piece.text:
            self._pieces.append(piece.text)
            entries = f',"logprobs":[{",".join(logprobs)}]' if kind == "message" else ""
            self._emit(f"{_EVENTS[kind]}.delta", f'{self._place(self._open)},"delta":{quoted(piece.text)}{entries}')
        self._logprobs += logprobs

    def _begin(self, kind: str, piece: Piece) -> ResponseItem:
        item = ResponseItem(kind, new_id(_IDS[kind]))
        if kind == "function_call":
            item.name, item.call_id = piece.text, call_id()
        self._pieces, self._logprobs = [], []
        self.items.append(item)
        self._emit("response.output_item.added", f'"output_index":{len(self.items) - 1},"item":{item.json()}')
        if kind == "message":
            self._emit("response.content_part.added", f'{self._place(item)},"part":{item.text_part()}')
        return item

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        item.status, item.text = status, "".join(self._pieces)
        place, done = self._place(item), f"{_EVENTS[item.kind]}.done"
        if item.kind == "function_call":
            self._emit(done, f'{place},"name":{quoted(item.name)},"arguments":{quoted(item.text)}')
        elif item.kind == "reasoning":
            self._emit(done, f'{place},"text":{quoted(item.text)}')
        else:
            item.logprobs = ",".join(self._logprobs)
            self._emit(done, f'{place},"text":{quoted(item.text)},"logprobs":[{item.logprobs}]')
            self._emit("response.content_part.done", f'{place},"part":{item.text_part()}')
        self._emit("response.output_item.done", f'"output_index":{len(self.items) - 1},"item":{item.json()}')

    def _place(self, item: ResponseItem) -> str:
        place = f'"item_id":"{item.id}","output_index":{len(self.items) - 1}'
        return place if item.kind == "function_call" else f'{place},"content_index":0'
