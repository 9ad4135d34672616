"""Converts requests of /v1/responses to conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from pydantic_core import from_json

from tgi_server.contract import Grammar
from tgi_server.router.answers.free_form import LOCAL_SHELL, free_form_arguments, name_for_model
from tgi_server.router.answers.tools import ToolUse
from tgi_server.router.api.admission import Admission
from tgi_server.router.api.encoding import to_json
from tgi_server.router.api.routes.chat_prompt import Asked
from tgi_server.router.api.routes.openai import openai_options
from tgi_server.router.api.routes.response_items import ResponseItem
from tgi_server.router.api.routes.response_tools import OfferedTools
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.media.images import ImageSource
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.response_input import (
    AdditionalTools,
    AnyItem,
    CallOutput,
    FunctionCall,
    InputImage,
    InputItem,
    InputMessage,
    InputPart,
    ItemReference,
    JsonPart,
    LocalShellCall,
    LocalShellOutput,
    ReasoningItem,
    RefusalPart,
    ResponsesFreeFormCall,
    TextPart,
)
from tgi_server.router.schemas.responses import ResponsesRequest, TextOptions
from tgi_server.router.stored_responses import new_id
from tgi_server.router.text.conversation import Conversation, PastCall, Turn, template_variables
from tgi_server.router.text.grammar import ANY_OBJECT, WHOLE_SCHEMA, json_grammar

LOGPROBS = "message.output_text.logprobs"
# Prefixes of the ids of items, by type.
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}

_TURNS = msgspec.json.Decoder(list[Turn])


def resolved(items: Sequence[InputItem], stored: Mapping[str, bytes]) -> list[InputItem]:
    """Replaces item references in an input by the items. stored: the referenced items as JSON, by id."""
    return [
        InputItem.model_validate(from_json(stored[item.root.id])) if isinstance(item.root, ItemReference) else item
        for item in items
    ]


def input_turns(items: Sequence[AnyItem]) -> list[Turn]:
    """Converts an input to turns of a conversation. Calls and thoughts become part of the assistant's turn."""
    turns: list[Turn] = []
    calls: list[PastCall] = []  # of the last turn
    thoughts = ""

    def begin(turn: Turn) -> None:
        if calls:
            turns[-1] = replace(turns[-1], calls=tuple(calls))
            calls.clear()
        turns.append(turn)

    def call(made: PastCall) -> None:
        if not turns or turns[-1].role != "assistant":
            begin(Turn("assistant"))
        calls.append(made)

    for index, item in enumerate(items):
        match item:
            case InputMessage(role=role, content=content):
                begin(Turn(role, _parts(content, f"input[{index}].content"), place=f"input[{index}]"))
            case FunctionCall(call_id=call_id, name=name, namespace=namespace, arguments=arguments):
                call(PastCall(call_id, name_for_model(name, namespace), arguments))
            case ResponsesFreeFormCall(call_id=call_id, name=name, namespace=namespace, input=text):
                call(PastCall(call_id, name_for_model(name, namespace), free_form_arguments(text)))
            case LocalShellCall(call_id=call_id, action=action):
                shown = action.model_dump(exclude={"type"}, exclude_none=True, exclude_defaults=True)
                call(PastCall(call_id, LOCAL_SHELL, shown))
            case CallOutput(call_id=call_id, output=output):
                parts = _parts(output, f"input[{index}].output")
                begin(Turn("tool", parts, tool_call_id=call_id, place=f"input[{index}]"))
            case LocalShellOutput(id=own_id, call_id=call_id, output=text):
                begin(Turn("tool", (text,), tool_call_id=call_id or own_id, place=f"input[{index}]"))
            case ReasoningItem(content=content, summary=summary):
                thoughts = _text(content or summary or ())
                continue
            case _:  # tools, and items that the prompt does not have
                continue
        if thoughts and turns[-1].role == "assistant":
            turns[-1] = replace(turns[-1], reasoning=thoughts)
        thoughts = ""
    if calls:
        turns[-1] = replace(turns[-1], calls=tuple(calls))
    return turns


def output_turns(output: Sequence[ResponseItem]) -> list[Turn]:
    """Converts the items of an output to a turn of the assistant."""
    turn = Turn("assistant")
    for item in output:
        if item.kind == "message":
            turn = replace(turn, parts=(item.text,))
        elif item.kind == "reasoning":
            turn = replace(turn, reasoning=item.text)
        else:
            arguments = free_form_arguments(item.text) if item.kind == "custom_tool_call" else item.text
            turn = replace(turn, calls=(*turn.calls, PastCall(item.call_id, item.called, arguments)))
    return [turn] if output else []


def turns_to_json(earlier: bytes, turns: Sequence[Turn]) -> bytes:
    """Returns turns as JSON objects, joined by commas. earlier: preceding turns in the same form."""
    return b",".join((earlier,) * bool(earlier) + tuple(map(to_json, turns)))


def turns_from_json(text: bytes) -> list[Turn]:
    """Returns the turns of a text from `turns_to_json`."""
    return _TURNS.decode(b"[%b]" % text)


def shown_input(items: Sequence[InputItem]) -> dict[str, bytes]:
    """Returns the items of an input for a stored response: as JSON, by new ids."""
    shown: dict[str, bytes] = {}
    for item in items:
        content = {"id": "", **item.root.model_dump(by_alias=True, exclude_none=True)}
        content["id"] = identity = new_id(_IDS.get(content["type"], "item"))
        if isinstance(item.root, InputMessage):
            kind = "output_text" if item.root.role == "assistant" else "input_text"
            texts = [{**part, "type": kind} if part["type"] == "text" else part for part in content["content"]]
            content |= {"status": "completed", "content": texts}
        elif isinstance(item.root, CallOutput) and len(item.root.output) == 1 and item.root.output[0].type == "text":
            content["output"] = item.root.output[0].text
        shown[identity] = to_json(content)
    return shown


def requested_tools(request: ResponsesRequest, items: Sequence[InputItem]) -> OfferedTools:
    """Returns the tools in a request and in its input."""
    offered = OfferedTools()
    offered.add(request.tools or (), "tools")
    for index, item in enumerate(items):
        if isinstance(item.root, AdditionalTools):
            offered.add(item.root.tools, f"input[{index}].tools")
    return offered


def response_conversation(request: ResponsesRequest, turns: Sequence[Turn], use: ToolUse) -> Conversation:
    """Returns the conversation whose next message is the response. turns: the turns so far. use: the tools."""
    if request.instructions:
        turns = [Turn("system", (request.instructions,), place="instructions"), *turns]
    effort = request.reasoning.effort if request.reasoning is not None else None
    variables = template_variables(request.chat_template_kwargs, effort=effort)
    return Conversation(turns, use, variables)


def requested_response(
    admission: Admission, request: ResponsesRequest, turns: Sequence[Turn], offered: OfferedTools
) -> Asked:
    """Returns the conversation and options of a response. turns: the turns so far. Raises InvalidRequest."""
    conversation = response_conversation(request, turns, offered.use(request))
    options = openai_options(admission, request, Dialect.RESPONSES)
    logprobs = LOGPROBS in (request.include or ())
    top = options.report.top_n_tokens if logprobs else 0
    report = replace(options.report, logprobs=logprobs, top_n_tokens=top)
    return conversation, replace(options, report=report, grammar=_form(request))


def _form(request: ResponsesRequest) -> Grammar | None:
    form = (request.text or TextOptions()).format
    if form.type == "text":
        return None
    if form.type == "json_object":
        return json_grammar(ANY_OBJECT)
    if form.json_schema is None:
        raise InvalidRequest.at("text.format.schema", "is missing: the type `json_schema` needs it")
    return json_grammar(
        form.json_schema, () if form.strict else (WHOLE_SCHEMA,), strict=bool(form.strict), place="text.format.schema"
    )


def _parts(content: Sequence[InputPart | JsonPart], place: str) -> tuple[str | ImageSource, ...]:
    """Returns the images and texts of a content; adjacent texts are joined. place: the field of the list."""
    parts: list[str | ImageSource] = []
    for index, part in enumerate(content):
        if isinstance(part, InputImage):
            parts.append(ImageSource(part.image_url, f"{place}[{index}]", part.detail))
        elif isinstance(part, TextPart | RefusalPart | JsonPart):
            if parts and isinstance(last := parts[-1], str):
                parts[-1] = last + part.text
            else:
                parts.append(part.text)
    return tuple(parts) or ("",)


def _text(content: Sequence[TextPart | RefusalPart]) -> str:
    return "".join(part.text for part in content)
