"""A request of Anthropic's interface as the chat that is to be answered."""

from dataclasses import replace

from tgi_server.router.api.routes.chat_prompt import ChatPlan
from tgi_server.router.api.routes.openai import named_adapter
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.media.images import ImageSource
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.messages import (
    DocumentBlock,
    ImageBlock,
    InputTurn,
    MessagesParameters,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlImage,
)
from tgi_server.router.service import Service
from tgi_server.router.text.conversation import (
    Conversation,
    PastCall,
    Turn,
    template_variables,
    thinking_switches,
)
from tgi_server.router.text.grammar import WHOLE_SCHEMA, json_grammar
from tgi_server.router.text.tools import Choice, ToolSpec, ToolUse, chosen_tools


def plan_message(service: Service, request: MessagesRequest) -> ChatPlan:
    """Returns what the request asks for. Takes time in proportion to its size. Raises InvalidRequest."""
    options = service.options.read(request, Dialect.MESSAGES)
    if not options.stopping.max_new_tokens:
        raise InvalidRequest("`max_tokens`: Field required")
    config = request.output_config
    form = None if config is None else config.format
    grammar = None if form is None else json_grammar(form.json_schema, (WHOLE_SCHEMA,))
    options = replace(options, adapter_id=named_adapter(service, request.model), grammar=grammar)
    if options.thinking_token_budget is None and service.text.answer_form.thoughts(grammar) is not None:
        options = replace(options, thinking_token_budget=_budget(request))
    show_thoughts = _thinks(request) and (request.thinking is None or request.thinking.display != "omitted")
    use = tools_of(request)
    return ChatPlan(Dialect.MESSAGES, conversation_of(request, use), use, options, show_thoughts)


def conversation_of(request: MessagesParameters, use: ToolUse | None = None) -> Conversation:
    """Returns the conversation. use: the tools that are shown; None: those that the request chooses.

    Raises InvalidRequest.
    """
    effort = request.output_config.effort if request.output_config is not None else None
    chosen = thinking_switches(on=_thinks(request)) | (request.chat_template_kwargs or {})
    turns = [Turn("system", tuple(block.text for block in request.system))] if request.system else []
    for index, message in enumerate(request.messages):
        turns += _turns(message, f"messages[{index}]")
    return Conversation(turns, (use or tools_of(request)).tools, template_variables(chosen, effort=effort))


def tools_of(request: MessagesParameters) -> ToolUse:
    """Returns the tools that the answer may call. Raises InvalidTool."""
    tools = [ToolSpec(each.name, each.description, each.input_schema, each.strict) for each in request.tools or ()]
    return chosen_tools(tools, _choice(request))


def _thinks(request: MessagesParameters) -> bool:
    """Returns True if thoughts are requested, which they are not by default."""
    return request.thinking is not None and request.thinking.type != "disabled"


def _budget(request: MessagesRequest) -> int | None:
    """Returns the tokens of thoughts that are requested; None: there is no bound. Other types than `enabled` have none.

    Clients have to send it: a model without thoughts is within any budget.
    """
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
                raise InvalidRequest("`tool_choice` of the type `tool` needs the `name` of a tool")
            return Choice(required=True, only=[selected.name], parallel=parallel)


def _turns(message: InputTurn, place: str) -> list[Turn]:
    """Returns a message as turns: each result of a tool is a turn of its own. place: where it stands in the request.

    Raises InvalidRequest for documents.
    """
    turns: list[Turn] = []
    parts: list[str | ImageSource] = []
    calls: list[PastCall] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        own = f"{place}.content[{index}]"
        match block.root:
            case ToolResultBlock(tool_use_id=call_id, content=content):
                results = (_part(each.root, f"{own}.content[{number}]") for number, each in enumerate(content))
                turns.append(Turn("tool", tuple(results), tool_call_id=call_id))
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                calls.append(PastCall(call_id, name, arguments))
            case ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case RedactedThinkingBlock():
                pass
            case TextBlock() | ImageBlock() | DocumentBlock() as other:
                parts.append(_part(other, own))
    if parts or calls or thoughts or not turns:
        turns.append(Turn(message.role, tuple(parts), "".join(thoughts) or None, tuple(calls)))
    return turns


def _part(block: TextBlock | ImageBlock | DocumentBlock, place: str) -> str | ImageSource:
    """Returns a block as a part of a turn. Raises InvalidRequest for a document."""
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, DocumentBlock):
        raise InvalidRequest(f"blocks of the type `{block.type}` are not supported: this model reads no documents")
    source = block.source
    url = source.url if isinstance(source, UrlImage) else f"data:{source.media_type};base64,{source.data}"
    return ImageSource(url, place)
