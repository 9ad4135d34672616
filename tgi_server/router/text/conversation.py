"""Turns a chat request into a prompt, with the model's chat template."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic_core import from_json

from shared.logging import one_line
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.chat import ChatRequest, ImageChunk, Message, TextChunk, Tool, ToolCall
from tgi_server.router.text.chat_template import RESERVED, ChatTemplate, RenderOptions, as_parts
from tgi_server.router.text.special_tokens import RenderedPrompt, SpecialTokens

_DEVELOPER = "developer"
# Variables with which templates turn a model's reasoning on and off.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


def render_conversation(
    template: ChatTemplate,
    request: ChatRequest,
    tools: Sequence[Tool],
    special_tokens: SpecialTokens | None = None,
    tool_prompt: str = "",
) -> RenderedPrompt:
    """Returns the prompt. If the template ignores tools, they are described at the end of the last message.

    special_tokens: those that only the template may write; None: messages may contain any. tool_prompt: tells the model
    how to call a tool, unless the request has such a prompt.

    Raises InvalidTemplate, or InvalidRequest for what the model cannot read.
    """
    developer = _DEVELOPER if template.knows_role(_DEVELOPER, tools=bool(tools)) else "system"
    shown = [_message(message, developer, template, tools=bool(tools)) for message in request.messages]
    options = RenderOptions(request.add_generation_prompt, request.continue_final_message)
    if shown and options.opens_turn(shown[-1]):
        # Rendered as it is, it would be a finished turn, after which a model generates nothing.
        shown, options = shown[:-1], RenderOptions(continue_last=False)
    described = [_tool(tool) for tool in tools]
    if shown and described:
        told = [] if template.shows_tools() else [json.dumps(described, ensure_ascii=False)]
        prompt = request.tool_prompt or tool_prompt
        if told or prompt:
            more = "\n".join(["\n---", *told, prompt])
            shown[-1]["content"] += more if isinstance(shown[-1]["content"], str) else as_parts(more)
    conversation = shown, described or None, _variables(request)
    render = partial(template.render, options=options)
    if special_tokens is None:
        return RenderedPrompt(render(*conversation))
    return special_tokens.render(render, conversation)


def _variables(request: ChatRequest) -> dict[str, Any]:
    """Returns the template's variables from the request. Raises InvalidRequest for those that the server sets."""
    variables: dict[str, Any] = {}
    if request.documents is not None:
        variables["documents"] = request.documents
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            variables |= dict.fromkeys(_THINKING_SWITCHES, False)
    chosen = request.chat_template_kwargs or {}
    if taken := sorted(RESERVED & chosen.keys()):
        raise InvalidRequest(f"`chat_template_kwargs` may not set {taken[0]!r}, which the server sets itself")
    return variables | chosen


def _message(message: Message, developer: str, template: ChatTemplate, *, tools: bool) -> dict[str, Any]:
    """Returns the message as the template expects it, without absent members.

    developer: the template's role for OpenAI's `developer`.
    """
    role = developer if message.role == _DEVELOPER else message.role
    texts = _texts(message)
    in_parts = template.reads_parts(role, tools=tools)
    shown: dict[str, Any] = {"role": role, "content": as_parts(*texts) if in_parts else "".join(texts)}
    if message.reasoning_content is not None:
        shown["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        as_text = template.reads_json(tools=tools)
        shown["tool_calls"] = [_tool_call(call, as_text=as_text) for call in message.tool_calls]
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def message_text(message: Message) -> str:
    """Returns the text of a message. Raises InvalidRequest for images."""
    return "".join(_texts(message))


def _texts(message: Message) -> list[str]:
    """Returns the texts of a message's parts. Raises InvalidRequest for images."""
    content = message.content.root if message.content is not None else ""
    if isinstance(content, str):
        return [content]
    texts: list[str] = []
    for chunk in content:
        if isinstance(chunk.root, ImageChunk):
            raise InvalidRequest("images are not supported: this model reads text only")
        texts.append(chunk.root.text if isinstance(chunk.root, TextChunk) else chunk.root.refusal)
    return texts


def _tool_call(call: ToolCall, *, as_text: bool) -> dict[str, Any]:
    """Returns the call with its arguments as an object, or as JSON. Raises InvalidRequest if they are not JSON."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = _read_arguments(arguments)
        except ValueError as error:
            raise InvalidRequest(
                f"the `arguments` of the tool call `{one_line(call.id, 100)}` are not JSON: {error}"
            ) from error
    shown = json.dumps(arguments or {}, ensure_ascii=False) if as_text else arguments or {}
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": shown}}


def _read_arguments(text: str) -> Any:
    """Returns the parsed arguments of an earlier call; of a call that was cut off, what can be parsed.

    Raises ValueError if the text is not the beginning of JSON.
    """
    if not text.strip():  # how many clients write a call without arguments
        return {}
    try:
        return from_json(text)  # bounds the nesting, and refuses lone surrogates
    except ValueError as error:
        if "EOF" not in str(error):
            raise
        # The text as it is would not do: many templates iterate over the members of an object.
        return from_json(text, allow_partial="trailing-strings")


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.arguments or {"type": "object", "properties": {}}
    return {"type": tool.type, "function": function}
