"""A conversation, independent of the API it came through, and its rendering to a prompt by the chat template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic_core import from_json

from shared.logging import one_line
from tgi_server.router.answers.tools import ToolSpec, ToolUse
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.media.images import ImageSource
from tgi_server.router.text.chat_template import (
    INSTRUCTING,
    RESERVED,
    ChatTemplate,
    RenderOptions,
    ShownContent,
    as_parts,
)
from tgi_server.router.text.special_tokens import RenderedPrompt, SpecialTokens

_DEVELOPER = "developer"
# Separates instructions that are joined.
_PARAGRAPH = "\n\n"
# System message for conversations without one, for models that read tools there.
_TOOLS_BESIDE = "You are a helpful assistant with some tools."
# Template variables that turn a model's reasoning on and off.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class PastCall:
    """A tool call that the model made earlier in the conversation. arguments: an object, or a text of JSON."""

    id: str
    name: str
    arguments: Any = None
    type: str = "function"


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a conversation, independent of the API it came through.

    parts: texts and images of its content. place: its field in the request, such as `messages[2]`. volatile: texts of
    the content that differ in each request, and so come last in the prompt.
    """

    role: str
    parts: tuple[str | ImageSource, ...] = ()
    reasoning: str | None = None
    calls: tuple[PastCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    place: str = field(default="", compare=False)
    volatile: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def images(self) -> list[ImageSource]:
        return [part for part in self.parts if isinstance(part, ImageSource)]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns so far, further input of the chat template, and options of the answer.

    use: tools and how they may be called. variables: of the chat template. tool_prompt: tells the model how to call a
    tool. add_generation_prompt, continue_last: as in `RenderOptions`. show_thoughts: True if the answer's thoughts are
    sent.
    """

    turns: Sequence[Turn]
    use: ToolUse = field(default_factory=ToolUse)
    variables: Mapping[str, Any] = field(default_factory=dict)
    tool_prompt: str | None = None
    add_generation_prompt: bool = True
    continue_last: bool | None = None
    show_thoughts: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidRequest if `variables` has one that the server sets itself."""
        if taken := sorted(RESERVED & self.variables.keys()):
            raise InvalidRequest.at("chat_template_kwargs", f"may not set {taken[0]!r}, which the server sets itself")

    @property
    def said(self) -> str:
        """The text of all turns."""
        return "\n".join(turn.text for turn in self.turns)

    @property
    def begun(self) -> str:
        """The text of the last turn if that is the assistant's, so that the answer may continue it; else empty."""
        last = self.turns[-1] if self.turns else None
        return last.text if last is not None and last.role == "assistant" and not last.calls else ""

    @property
    def images(self) -> list[ImageSource]:
        """The images of all turns, in their order."""
        return [image for turn in self.turns for image in turn.images]


def template_variables(
    chosen: Mapping[str, Any] | None, *, effort: str | None = None, documents: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Returns the template's variables. chosen: those that the request sets. effort: the reasoning effort."""
    variables: dict[str, Any] = {}
    if documents is not None:
        variables["documents"] = documents
    if effort is not None:
        variables["reasoning_effort"] = effort
        if effort == "none":
            variables |= thinking_switches(on=False)
    return variables | dict(chosen or {})


def thinking_switches(*, on: bool) -> dict[str, bool]:
    """Returns the template variables that turn a model's reasoning on or off."""
    return dict.fromkeys(_THINKING_SWITCHES, on)


def render_conversation(
    template: ChatTemplate,
    conversation: Conversation,
    special_tokens: SpecialTokens | None = None,
    tool_prompt: str = "",
) -> RenderedPrompt:
    """Renders a conversation to a prompt.

    If the template ignores tools, they are described at the end of the last message. If it shows instructions only as
    the first message, all instructions are joined there.

    special_tokens: tokens that only the template may write; None: messages may contain any. tool_prompt: tells the
    model how to call a tool, unless the request has such a prompt.

    Raises InvalidTemplate, or InvalidRequest for tool calls that are not JSON.
    """
    tools = conversation.use.shown
    developer = _DEVELOPER if template.knows_role(_DEVELOPER, tools=bool(tools)) else "system"
    turns = _with_tool_names(conversation.turns)
    said = [_message(turn, developer, template, tools=bool(tools)) for turn in turns]
    shown = _with_joined_instructions(said, template, tools=bool(tools))
    # If the last messages were instructions that moved to the front, an answer before them must not be continued.
    continue_last = conversation.continue_last if said[-1:] == shown[-1:] else False
    options = RenderOptions(conversation.add_generation_prompt, continue_last)
    if shown and options.opens_turn(shown[-1]):
        # Rendered unchanged, it would be a complete turn, after which a model generates nothing.
        shown, options = shown[:-1], RenderOptions(continue_last=False)
    described = [_tool(tool) for tool in tools]
    if shown and described:
        told = [] if template.shows_tools() else [json.dumps(described, ensure_ascii=False)]
        prompt = conversation.tool_prompt or tool_prompt
        if conversation.use.tools and (told or prompt):
            more = "\n".join(["\n---", *told, prompt])
            shown[-1]["content"] += more if isinstance(shown[-1]["content"], str) else as_parts(more)
        if template.reads_tools_of_system():
            if shown[0]["role"] != "system":
                shown.insert(0, {"role": "system", "content": _TOOLS_BESIDE})
            shown[0]["tools"] = json.dumps([each["function"] for each in described], ensure_ascii=False)
    rendered = shown, described or None, dict(conversation.variables)
    render = partial(template.render, options=options)
    if special_tokens is None:
        return RenderedPrompt(render(*rendered))
    return special_tokens.render(render, rendered)


def with_volatile_last(turns: Sequence[Turn]) -> list[Turn]:
    """Moves all volatile texts to the end of the user's last turn, or of the last turn if there is none of the user.

    So everything before them is the same in each request. Other turns that become empty are left out.
    """
    moved = [text for turn in turns for text in turn.volatile]
    if not moved:
        return list(turns)
    last = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=len(turns) - 1)
    ordered = []
    for index, turn in enumerate(turns):
        if index == last:
            first, *others = moved
            texts = [f"{_PARAGRAPH}{first}" if turn.parts else first, *(f"{_PARAGRAPH}{text}" for text in others)]
            ordered.append(replace(turn, parts=(*turn.parts, *texts), volatile=()))
        elif turn.parts or turn.calls or turn.reasoning:
            ordered.append(replace(turn, volatile=()))
    return ordered


def _with_tool_names(turns: Sequence[Turn]) -> list[Turn]:
    """Adds the tool's name to each tool result without one: that of the last call with its id."""
    names: dict[str | None, str] = {}
    named = []
    for turn in turns:
        names |= {call.id: call.name for call in turn.calls}
        unnamed = turn.role == "tool" and turn.name is None
        named.append(replace(turn, name=names.get(turn.tool_call_id)) if unnamed else turn)
    return named


def _with_joined_instructions(
    messages: list[dict[str, Any]], template: ChatTemplate, *, tools: bool
) -> list[dict[str, Any]]:
    """Joins all instructions, in order, to one first message, unless the template shows them at any position."""
    instructions = [message for message in messages if message["role"] in INSTRUCTING]
    if instructions == messages[:1] or all(
        template.reads_later_instructions(message["role"], tools=tools) for message in instructions
    ):
        return messages
    joined = [{**instructions[0], "content": _joined([instruction["content"] for instruction in instructions])}]
    moved = False
    for message in messages:
        if message["role"] in INSTRUCTING:
            moved = True
            continue
        if moved and message["role"] == joined[-1]["role"] == "user":  # templates want roles to alternate
            joined[-1] = {**joined[-1], "content": _joined([joined[-1]["content"], message["content"]])}
        else:
            joined.append(message)
        moved = False
    return joined


def _joined(contents: Sequence[ShownContent]) -> ShownContent:
    """Joins contents to one, with an empty line between them."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return _PARAGRAPH.join(texts)
    lists = [as_parts(content) if isinstance(content, str) else content for content in contents]
    return [*lists[0], *(part for parts in lists[1:] for part in (*as_parts(_PARAGRAPH), *parts))]


def _message(turn: Turn, developer: str, template: ChatTemplate, *, tools: bool) -> dict[str, Any]:
    """Returns a turn as the message that the template expects, without members that are None.

    developer: the template's role for OpenAI's `developer`.
    """
    role = developer if turn.role == _DEVELOPER else turn.role
    in_parts = bool(turn.images) or template.reads_parts(role, tools=tools)
    parts = (part if isinstance(part, str) else None for part in turn.parts)
    shown: dict[str, Any] = {"role": role, "content": as_parts(*parts) if in_parts else turn.text}
    if turn.reasoning is not None:
        shown["reasoning_content"] = turn.reasoning
        if not (turn.calls and shown["content"]):  # gpt-oss's template refuses all three together
            shown["thinking"] = turn.reasoning
    if turn.calls:
        as_text = template.reads_json(tools=tools)
        shown["tool_calls"] = [_tool_call(call, as_text=as_text) for call in turn.calls]
    if turn.name is not None:
        shown["name"] = turn.name
    if turn.tool_call_id is not None:
        shown["tool_call_id"] = turn.tool_call_id
    return shown


def _tool_call(call: PastCall, *, as_text: bool) -> dict[str, Any]:
    """Returns a call with its arguments as an object, or as JSON text. Raises InvalidRequest if they are not JSON."""
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = _read_arguments(arguments)
        except ValueError as error:
            raise InvalidRequest(
                f"the `arguments` of the tool call `{one_line(call.id, 100)}` are not JSON: {error}"
            ) from error
    shown = json.dumps(arguments or {}, ensure_ascii=False) if as_text else arguments or {}
    return {"id": call.id, "type": call.type, "function": {"name": call.name, "arguments": shown}}


def _read_arguments(text: str) -> Any:
    """Parses the arguments of an earlier call; if the call was cut off, as much as there is.

    Raises ValueError if the text is not the beginning of JSON.
    """
    if not text.strip():  # how many clients write a call without arguments
        return {}
    try:
        return from_json(text)  # bounds the nesting, and refuses lone surrogates
    except ValueError as error:
        if "EOF" not in str(error):
            raise
        # Many templates iterate over the members of an object, so the incomplete text itself would not do.
        return from_json(text, allow_partial="trailing-strings")


def _tool(tool: ToolSpec) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.shown or tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
