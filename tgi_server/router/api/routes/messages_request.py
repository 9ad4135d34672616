"""Converts requests of Anthropic's API to conversations."""

import json
from collections.abc import Iterator
from dataclasses import replace

from tgi_server.router.answers.tools import Choice, ToolSpec, ToolUse, chosen_tools
from tgi_server.router.api.admission import Admission
from tgi_server.router.api.routes.chat_prompt import Asked
from tgi_server.router.api.routes.client_tools import client_tool
from tgi_server.router.api.routes.context_edits import ContextEdits
from tgi_server.router.api.routes.openai import named_adapter
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.media.images import ImageSource
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.message_blocks import (
    Base64Image,
    CompactionBlock,
    ContentSource,
    DocumentBlock,
    ImageBlock,
    PlainTextSource,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
    UrlImage,
)
from tgi_server.router.schemas.messages import (
    InputTurn,
    MessagesClientTool,
    MessagesLeftOutTool,
    MessagesParameters,
    MessagesRequest,
    OfferedTool,
)
from tgi_server.router.text.conversation import (
    Conversation,
    PastCall,
    Turn,
    template_variables,
    thinking_switches,
)
from tgi_server.router.text.grammar import WHOLE_SCHEMA, json_grammar

# The beginning of a block that Claude Code puts before its instructions. It differs in each request, so the prefix
# cache would have no prompt with it, and it means nothing to a model.
_BILLING = "x-anthropic-billing-header:"


def requested_message(admission: Admission, request: MessagesRequest, edits: ContextEdits) -> Asked:
    """Converts a request to a conversation and options. Takes time in proportion to its size. Raises InvalidRequest."""
    service, config = admission.service, request.output_config
    form = None if config is None else config.format
    grammar = (
        None if form is None else json_grammar(form.json_schema, (WHOLE_SCHEMA,), place="output_config.format.schema")
    )
    thinks = service.text.answer_form.thoughts(grammar) is not None
    budget = {"thinking_token_budget": ("thinking.budget_tokens", _budget(request))} if thinks else None
    options = admission.options(request, Dialect.MESSAGES, streams=request.stream, elsewhere=budget)
    options = replace(options, adapter_id=named_adapter(service, request.model), grammar=grammar)
    if not options.stopping.max_new_tokens:
        options = replace(options, stopping=replace(options.stopping, max_new_tokens=1))
    show_thoughts = _thinks(request) and (request.thinking is None or request.thinking.display != "omitted")
    return replace(edits.apply(conversation_of(request)), show_thoughts=show_thoughts), options


def conversation_of(request: MessagesParameters) -> Conversation:
    """Returns the conversation that a request asks to answer. Raises InvalidRequest."""
    effort = request.output_config.effort if request.output_config is not None else None
    chosen = thinking_switches(on=_thinks(request)) | (request.chat_template_kwargs or {})
    told = tuple(block.text for block in request.system or () if not block.text.startswith(_BILLING))
    turns = [Turn("system", told, place="system")] if told else []
    last_user = max((index for index, each in enumerate(request.messages) if each.role == "user"), default=-1)
    for index, message in enumerate(request.messages):
        if not (message.role == "system" and message.clear_at == "next_user_message" and index < last_user):
            turns += turns_of(message, f"messages[{index}]")
    return Conversation(turns, tools_of(request), template_variables(chosen, effort=effort))


def tools_of(request: MessagesParameters) -> ToolUse:
    """Returns the tools that the answer may call. Raises InvalidTool."""
    offered = (tool.root for tool in request.tools or ())
    return chosen_tools(
        [_tool(each) for each in offered if not isinstance(each, MessagesLeftOutTool)], _choice(request)
    )


def _tool(tool: OfferedTool | MessagesClientTool) -> ToolSpec:
    if isinstance(tool, MessagesClientTool):
        return client_tool(tool.type, tool.name, tool.strict)
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(json.dumps(example, ensure_ascii=False) for example in tool.input_examples)
        description = f"{description or ''}\n\nExamples of arguments:\n{examples}".strip()
    return ToolSpec(tool.name, description, tool.input_schema, tool.strict)


def _thinks(request: MessagesParameters) -> bool:
    """Returns True if thinking is requested. It is off by default."""
    return request.thinking is not None and request.thinking.type != "disabled"


def _budget(request: MessagesRequest) -> int | None:
    """Returns the requested thinking budget in tokens; None: unlimited. Only the type `enabled` has a budget."""
    thinking = request.thinking
    return thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None


def _choice(request: MessagesParameters) -> Choice | None:
    """Returns the choice of tools; None: no tool may be called."""
    selected = request.tool_choice
    if selected is None:
        return Choice()
    parallel = not selected.disable_parallel_tool_use
    match selected.type:
        case "none":
            return None
        case "auto":
            return Choice(parallel=parallel)
        case "any":
            return Choice(required=True, parallel=parallel)
        case "tool":
            if selected.name is None:
                raise InvalidRequest.at("tool_choice.name", "is missing: the type `tool` needs it")
            return Choice(required=True, only=[selected.name], parallel=parallel)


def turns_of(message: InputTurn, path: str) -> list[Turn]:
    """Returns a message as turns: each tool result is a separate turn. path: the message's field in the request."""
    turns: list[Turn] = []
    parts: list[str | ImageSource] = []
    calls: list[PastCall] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        own = f"{path}.content[{index}]"
        match block.root:
            case ToolResultBlock(tool_use_id=call_id, content=content):
                results = [
                    part
                    for number, each in enumerate(content)
                    for part in _parts(each.root, f"{own}.content[{number}]")
                ]
                turns.append(Turn("tool", tuple(results), tool_call_id=call_id, place=own))
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                calls.append(PastCall(call_id, name, arguments))
            case ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case other:
                parts += _parts(other, own)
    if parts or calls or thoughts or not (turns or message.role == "system"):
        turns.append(Turn(message.role, tuple(parts), "".join(thoughts) or None, tuple(calls), place=path))
    return turns


def _parts(block: object, path: str) -> Iterator[str | ImageSource]:
    """Yields the texts and images of a block; nothing for a block without content for the model."""
    match block:
        case TextBlock(text=text) | CompactionBlock(content=text) | ToolReference(tool_name=text):
            yield text
        case ImageBlock(source=UrlImage(url=url)):
            yield ImageSource(url, path)
        case ImageBlock(source=Base64Image(media_type=media_type, data=data)):
            yield ImageSource(f"data:{media_type};base64,{data}", path)
        case DocumentBlock(title=title, context=context, source=source):
            yield _heading("document", title, context)
            if isinstance(source, PlainTextSource):
                yield source.data
            elif isinstance(source, ContentSource):
                for index, each in enumerate(source.content):
                    yield from _parts(each.root, f"{path}.source.content[{index}]")
            yield "\n</document>\n"
        case SearchResultBlock(title=title, source=url, content=content):
            yield _heading("search_result", title, url)
            yield from (each.text for each in content)
            yield "\n</search_result>\n"


def _heading(tag: str, *lines: str | None) -> str:
    """Returns the opening tag of a document, and lines such as its title."""
    return "\n".join([f"<{tag}>", *filter(None, lines), ""])
