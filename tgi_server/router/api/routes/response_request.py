"""A request for a response as the chat that it is."""

from collections.abc import Sequence
from typing import Any

from tgi_server.router.api.body import validate
from tgi_server.router.api.routes.response_items import ResponseItem
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.openai import TextParameters
from tgi_server.router.schemas.responses import (
    AllowedFunctions,
    ChosenFunction,
    FunctionCall,
    FunctionCallOutput,
    InputMessage,
    ReasoningItem,
    ResponsesRequest,
    TextOptions,
    TextPart,
)

LOGPROBS = "message.output_text.logprobs"


def input_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Returns the input as messages of a chat. Calls and thoughts belong to one message of the assistant."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for item in request.input:
        match item.root:
            case InputMessage(role=role, content=content):
                messages.append({"role": role, "content": _text(content)})
            case FunctionCall() as call:
                function = {"name": call.name, "arguments": call.arguments}
                _assistant(messages).setdefault("tool_calls", []).append({"id": call.call_id, "function": function})
            case FunctionCallOutput(call_id=call_id, output=output):
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _text(output)})
            case ReasoningItem(content=content, summary=summary):
                thoughts = _text(content or summary or ())
                continue
        if thoughts and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thoughts
        thoughts = ""
    return messages


def output_messages(output: Sequence[ResponseItem]) -> list[dict[str, Any]]:
    """Returns the items of an output as the message of the assistant that they are."""
    message: dict[str, Any] = {"role": "assistant"}
    for item in output:
        if item.kind == "message":
            message["content"] = item.text
        elif item.kind == "reasoning":
            message["reasoning_content"] = item.text
        else:
            function = {"name": item.name, "arguments": item.text}
            message.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    return [message] if len(message) > 1 else []


def chat_request(request: ResponsesRequest, messages: Sequence[dict[str, Any]]) -> ChatRequest:
    """Returns the chat whose next message is the response. Raises InvalidRequest.

    messages: the conversation so far.
    """
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    logprobs = LOGPROBS in (request.include or ())
    fields = {
        "model": request.model,
        **{name: value for name in TextParameters.model_fields if (value := getattr(request, name)) is not None},
        "messages": [*system, *messages],
        "max_completion_tokens": request.max_output_tokens,
        "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in request.tools or ()],
        "tool_choice": _choice(request),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _form(request),
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
        "logprobs": logprobs,
        "top_logprobs": request.top_logprobs if logprobs else None,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    return validate(ChatRequest, fields)


def _choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, ChosenFunction):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedFunctions):
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _form(request: ResponsesRequest) -> Any:
    form = (request.text or TextOptions()).format
    if form.type == "json_schema":
        schema = {"name": form.name, "schema": form.json_schema, "strict": form.strict}
        return {"type": "json_schema", "json_schema": schema}
    return {"type": form.type}


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the last message, if it is the assistant's, or else a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Sequence[TextPart]) -> str:
    return "".join(part.text for part in content)
