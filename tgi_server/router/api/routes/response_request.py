"""A request for a response as the chat that is to be answered."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from tgi_server.contract import Grammar
from tgi_server.router.api.encoding import to_json
from tgi_server.router.api.routes.chat_prompt import ChatPlan
from tgi_server.router.api.routes.openai import openai_options
from tgi_server.router.api.routes.response_items import ResponseItem
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.media.images import ImageSource
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.responses import (
    AllowedFunctions,
    ChosenFunction,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputImage,
    InputMessage,
    ReasoningItem,
    ResponsesRequest,
    TextOptions,
    TextPart,
)
from tgi_server.router.service import Service
from tgi_server.router.text.conversation import Conversation, PastCall, Turn, template_variables
from tgi_server.router.text.grammar import ANY_OBJECT, WHOLE_SCHEMA, json_grammar
from tgi_server.router.text.tools import Choice, ToolSpec, chosen_tools

LOGPROBS = "message.output_text.logprobs"

_TURNS = msgspec.json.Decoder(list[Turn])


def input_turns(items: str | Sequence[InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem]) -> list[Turn]:
    """Returns an input as turns of a conversation. Calls and thoughts belong to one turn of the assistant."""
    if isinstance(items, str):
        return [Turn("user", (items,))]
    turns: list[Turn] = []
    calls: list[PastCall] = []  # of the last turn
    thoughts = ""

    def begin(turn: Turn) -> None:
        if calls:
            turns[-1] = replace(turns[-1], calls=tuple(calls))
            calls.clear()
        turns.append(turn)

    for index, item in enumerate(items):
        match item:
            case InputMessage(role=role, content=content):
                begin(Turn(role, _parts(content, f"input[{index}].content")))
            case FunctionCall(call_id=call_id, name=name, arguments=arguments):
                if not turns or turns[-1].role != "assistant":
                    begin(Turn("assistant"))
                calls.append(PastCall(call_id, name, arguments))
            case FunctionCallOutput(call_id=call_id, output=output):
                begin(Turn("tool", _parts(output, f"input[{index}].output"), tool_call_id=call_id))
            case ReasoningItem(content=content, summary=summary):
                thoughts = _text(content or summary or ())
                continue
        if thoughts and turns[-1].role == "assistant":
            turns[-1] = replace(turns[-1], reasoning=thoughts)
        thoughts = ""
    if calls:
        turns[-1] = replace(turns[-1], calls=tuple(calls))
    return turns


def output_turns(output: Sequence[ResponseItem]) -> list[Turn]:
    """Returns the items of an output as the turn of the assistant that they are."""
    turn = Turn("assistant")
    for item in output:
        if item.kind == "message":
            turn = replace(turn, parts=(item.text,))
        elif item.kind == "reasoning":
            turn = replace(turn, reasoning=item.text)
        else:
            turn = replace(turn, calls=(*turn.calls, PastCall(item.call_id, item.name, item.text)))
    return [turn] if output else []


def turns_to_json(earlier: bytes, turns: Sequence[Turn]) -> bytes:
    """Returns turns as JSON, joined by commas. earlier: JSON of the turns before them, in the same form."""
    return b",".join((earlier,) * bool(earlier) + tuple(map(to_json, turns)))


def turns_from_json(text: bytes) -> list[Turn]:
    """text: as `turns_to_json` returns it."""
    return _TURNS.decode(b"[%b]" % text)


def plan_response(service: Service, request: ResponsesRequest, turns: Sequence[Turn]) -> ChatPlan:
    """Returns the chat whose next message is the response. turns: the conversation so far. Raises InvalidRequest."""
    if request.instructions:
        turns = [Turn("system", (request.instructions,)), *turns]
    use = chosen_tools(list(map(_function, request.tools or ())), _choice(request))
    options = openai_options(service, request, Dialect.RESPONSES)
    logprobs = LOGPROBS in (request.include or ())
    top = options.report.top_n_tokens if logprobs else 0
    report = replace(options.report, logprobs=logprobs, top_n_tokens=top)
    effort = request.reasoning.effort if request.reasoning is not None else None
    variables = template_variables(request.chat_template_kwargs, effort=effort)
    return ChatPlan(
        Dialect.RESPONSES,
        Conversation(turns, use.shown, variables, may_call=bool(use.tools)),
        use,
        replace(options, report=report, grammar=_form(request)),
    )


def _function(tool: FunctionTool) -> ToolSpec:
    return ToolSpec(tool.name, tool.description, tool.parameters, tool.strict)


def _choice(request: ResponsesRequest) -> Choice | None:
    """Returns the choice of tools; None: no tool may be called."""
    match request.tool_choice or "auto":
        case "none":
            return None
        case ChosenFunction(name=name):
            return Choice(required=True, only=[name], parallel=False)
        case AllowedFunctions(mode=mode, tools=tools):
            return Choice(mode == "required", [tool.name for tool in tools], request.parallel_tool_calls)
        case mode:
            return Choice(mode == "required", parallel=request.parallel_tool_calls)


def _form(request: ResponsesRequest) -> Grammar | None:
    form = (request.text or TextOptions()).format
    if form.type == "text":
        return None
    if form.type == "json_object":
        return json_grammar(ANY_OBJECT)
    if form.json_schema is None:
        raise InvalidRequest("`text.format` of the type `json_schema` needs a `schema`", param="text.format.schema")
    return json_grammar(form.json_schema, () if form.strict else (WHOLE_SCHEMA,), strict=bool(form.strict))


def _parts(content: Sequence[TextPart | InputImage], place: str) -> tuple[str | ImageSource, ...]:
    """Returns the images of a content, and its texts, joined where no image stands between them. place: of the list."""
    parts: list[str | ImageSource] = []
    for index, part in enumerate(content):
        if isinstance(part, InputImage):
            parts.append(ImageSource(part.image_url, f"{place}[{index}]", part.detail))
        elif parts and isinstance(last := parts[-1], str):
            parts[-1] = last + part.text
        else:
            parts.append(part.text)
    return tuple(parts) or ("",)


def _text(content: Sequence[TextPart]) -> str:
    return "".join(part.text for part in content)
