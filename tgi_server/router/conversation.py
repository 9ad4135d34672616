"""A chat request as a prompt."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from shared.logging import one_line
from tgi_server.router.chat_template import ChatTemplate
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.chat import Message, TextChunk, Tool, ToolCall
from tgi_server.router.special_tokens import RenderedPrompt, SpecialTokens
from tgi_server.router.tool_grammar import DEFAULT_TOOL_PROMPT


def render_conversation(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    tool_prompt: str | None,
    special_tokens: SpecialTokens | None = None,
) -> RenderedPrompt:
    """Returns the prompt. A template that knows nothing of tools has them told at the end of the last message.

    special_tokens: that only the template may write; None: messages may, too.

    Raises InvalidTemplate, or InvalidRequest for what the model cannot read.
    """
    shown = [_message(message) for message in messages]
    described = [_tool(tool) for tool in tools]
    if shown and described:
        native = template.shows_tools()
        told = [] if native else [json.dumps(described, ensure_ascii=False)]
        prompt = tool_prompt or ("" if native else DEFAULT_TOOL_PROMPT)
        if prompt:
            shown[-1]["content"] += "\n".join(["\n---", *told, prompt])
    conversation = shown, described or None
    if special_tokens is None:
        return RenderedPrompt(template.render(*conversation))
    return special_tokens.render(template.render, conversation)


def _message(message: Message) -> dict[str, Any]:
    """As templates expect it: absent members are left out, content is text, arguments are objects."""
    shown: dict[str, Any] = {"role": message.role, "content": message_text(message)}
    if message.tool_calls:
        shown["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def message_text(message: Message) -> str:
    """What a message says. Raises InvalidRequest for what is no text."""
    content = message.content.root if message.content is not None else ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for chunk in content:
        if not isinstance(chunk.root, TextChunk):
            raise InvalidRequest("images are not supported: this model reads text only")
        texts.append(chunk.root.text)
    return "".join(texts)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments)  # which bounds how deep it may nest, and takes no lone surrogates
        except ValueError as error:
            raise InvalidRequest(
                f"the `arguments` of the tool call `{one_line(call.id, 100)}` are not JSON: {error}"
            ) from error
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments or {}}}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.arguments or {"type": "object", "properties": {}}
    return {"type": tool.type, "function": function}
