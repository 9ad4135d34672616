"""The output items of a response: built from the pieces of an answer, and sent as events at the same time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from tgi_server.router.answers.free_form import read_arguments
from tgi_server.router.answers.reader import AnswerPart, Piece
from tgi_server.router.answers.tools import ClientTool, ToolKind
from tgi_server.router.api.routes.chat_answer import call_id
from tgi_server.router.schemas.chat import ChatCompletionLogprob
from tgi_server.router.schemas.responses import (
    AnyOutputItem,
    OutputFreeFormCall,
    OutputFunctionCall,
    OutputMessageItem,
    OutputReasoning,
    OutputShellAction,
    OutputShellCall,
    OutputText,
    ReasoningText,
)
from tgi_server.router.stored_responses import new_id

# Sends an event, given its type and its members.
Emit = Callable[[str, dict[str, Any]], None]

_KINDS = {AnswerPart.TEXT: "message", AnswerPart.THOUGHT: "reasoning"}
_CALLS = {
    ToolKind.FUNCTION: "function_call",
    ToolKind.FREE_FORM: "custom_tool_call",
    ToolKind.LOCAL_SHELL: "local_shell_call",
}
# The ids of each kind, and the events of its pieces.
_IDS = {
    **{"message": "msg", "reasoning": "rs"},
    **{"function_call": "fc", "custom_tool_call": "ctc", "local_shell_call": "lsh"},
}
_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


@dataclass(slots=True)
class ResponseItem:
    """An output item of a response.

    tool, called, call_id: for a call, the tool, the name that the model used, and the id. text: the item's text; for a
    call its arguments, or the input of a tool whose input is text.
    """

    kind: str
    id: str
    tool: ClientTool | None = None
    called: str = ""
    call_id: str = ""
    status: str = "in_progress"
    text: str = ""
    logprobs: list[ChatCompletionLogprob] = field(default_factory=list)

    def shown(self) -> AnyOutputItem:
        """Returns the item for the client, without content while it is in progress."""
        if self.tool is not None:
            return self._shown_call(self.tool)
        begun = self.status == "in_progress"
        if self.kind == "reasoning":
            return OutputReasoning(
                id=self.id, status=self.status, content=[] if begun else [ReasoningText(text=self.text)]
            )
        return OutputMessageItem(id=self.id, status=self.status, content=[] if begun else [self.text_part()])

    def _shown_call(self, tool: ClientTool) -> AnyOutputItem:
        call: dict[str, Any] = {"id": self.id, "status": self.status, "call_id": self.call_id}
        if tool.kind is ToolKind.LOCAL_SHELL:
            return OutputShellCall(**call, action=_shell_action(read_arguments(self.text)))
        namespace = UNSET if tool.namespace is None else tool.namespace
        if tool.kind is ToolKind.FREE_FORM:
            return OutputFreeFormCall(**call, name=tool.name, namespace=namespace, input=self.text)
        return OutputFunctionCall(**call, name=tool.name, namespace=namespace, arguments=self.text)

    def text_part(self) -> OutputText:
        """Returns the text of a message as a content part."""
        return OutputText(text=self.text, logprobs=self.logprobs)


def _shell_action(arguments: Mapping[str, Any]) -> OutputShellAction:
    """Returns the action of a `local_shell` call. Arguments may be missing if the call was cut off."""
    command, env = arguments.get("command"), arguments.get("env")
    return OutputShellAction(
        command=[str(each) for each in command] if isinstance(command, list) else [],
        env={name: str(value) for name, value in env.items()} if isinstance(env, dict) else {},
        timeout_ms=arguments.get("timeout_ms"),
        working_directory=arguments.get("working_directory"),
    )


class ResponseItems:
    """Collects the output items of one response.

    reason: the finish reason; None until the answer has ended. incomplete: True if it was cut off by its length, or by
    a stop sequence within a call. thoughts: number of pieces of thoughts.
    """

    def __init__(self, emit: Emit, tools: Mapping[str, ClientTool]) -> None:
        """tools: tools that are not plain functions, by the names that the model sees."""
        self._tools = tools
        self.items: list[ResponseItem] = []
        self.reason: str | None = None
        self.incomplete = False
        self.thoughts = 0
        self._emit = emit
        self._open: ResponseItem | None = None
        self._pieces: list[str] = []
        self._logprobs: list[ChatCompletionLogprob] = []

    def shown(self) -> list[AnyOutputItem]:
        """Returns the items for the client."""
        return [item.shown() for item in self.items]

    def piece(self, piece: Piece, logprobs: Sequence[ChatCompletionLogprob], reason: str | None) -> None:
        if piece.text or piece.part is AnswerPart.CALL or not self.items:
            self._take(piece, logprobs)
        else:
            self._logprobs += logprobs
        if reason is not None:
            in_call = self._open is not None and self._open.tool is not None
            self.reason, self.incomplete = reason, reason == "length" or (in_call and reason != "tool_calls")
            self._close("incomplete" if self.incomplete else "completed")

    def _take(self, piece: Piece, logprobs: Sequence[ChatCompletionLogprob]) -> None:
        same = self._open is not None and self._open.kind == _KINDS.get(piece.part, self._open.kind)
        if piece.part is AnswerPart.CALL or self._open is None or not same:
            self._close("completed")
            self._open = self._begin(piece)
        kind = self._open.kind
        self.thoughts += piece.part is AnswerPart.THOUGHT
        if piece.part is not AnswerPart.CALL and piece.text:
            self._pieces.append(piece.text)
            entries = {"logprobs": list(logprobs)} if kind == "message" else {}
            if kind in _EVENTS:
                self._emit(f"{_EVENTS[kind]}.delta", {**self._place(self._open), "delta": piece.text, **entries})
        self._logprobs += logprobs

    def _begin(self, piece: Piece) -> ResponseItem:
        tool = self._tools.get(piece.text, ClientTool(piece.text)) if piece.part is AnswerPart.CALL else None
        kind = _KINDS[piece.part] if tool is None else _CALLS[tool.kind]
        item = ResponseItem(kind, new_id(_IDS[kind]), tool)
        if tool is not None:
            item.called, item.call_id = piece.text, piece.id or call_id()
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
        place, done = self._place(item), f"{_EVENTS.get(item.kind)}.done"
        if item.kind == "function_call" and item.tool is not None:
            self._emit(done, {**place, "name": item.tool.name, "arguments": item.text})
        elif item.kind == "custom_tool_call":
            self._emit(done, {**place, "input": item.text})
        elif item.kind == "local_shell_call":
            pass  # no events exist for it
        elif item.kind == "reasoning":
            self._emit(done, {**place, "text": item.text})
        else:
            item.logprobs = self._logprobs
            self._emit(done, {**place, "text": item.text, "logprobs": item.logprobs})
            self._emit("response.content_part.done", {**place, "part": item.text_part()})
        self._emit("response.output_item.done", {"output_index": len(self.items) - 1, "item": item.shown()})

    def _place(self, item: ResponseItem) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self.items) - 1}
        return place if item.tool is not None else {**place, "content_index": 0}
