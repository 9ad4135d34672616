"""A request of Anthropic's interface as the chat that is to be answered."""

import json
from dataclasses import replace

from tgi_server.router.answers.tools import Choice, ToolSpec, ToolUse, chosen_tools
from tgi_server.router.api.admission import Admission
from tgi_server.router.api.routes.chat_prompt import Chat
from tgi_server.router.api.routes.client_tools import client_tool
from tgi_server.router.api.routes.context_edits import ContextEdits
from tgi_server.router.api.routes.message_turns import turns_of
from tgi_server.router.api.routes.openai import named_adapter
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.messages import (
    MessagesClientTool,
    MessagesLeftOutTool,
    MessagesParameters,
    MessagesRequest,
    OfferedTool,
)
from tgi_server.router.text.conversation import (
    Conversation,
    Turn,
    template_variables,
    thinking_switches,
)
from tgi_server.router.text.grammar import WHOLE_SCHEMA, json_grammar

# The beginning of a block that Claude Code puts before its instructions: it differs with each request, so no prompt
# with it would be found in the prefix cache, and it says nothing to a model.
_BILLING = "x-anthropic-billing-header:"


def requested_message(admission: Admission, request: MessagesRequest, edits: ContextEdits) -> Chat:
    """Returns what the request asks for. Takes time in proportion to its size. Raises InvalidRequest."""
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
    use = tools_of(request)
    conversation = edits.apply(conversation_of(request, use))
    return Chat(Dialect.MESSAGES, conversation, use, options, show_thoughts)


def conversation_of(request: MessagesParameters, use: ToolUse | None = None) -> Conversation:
    """Returns the conversation. use: the tools that are shown; None: as the request chooses.

    Raises InvalidRequest.
    """
    effort = request.output_config.effort if request.output_config is not None else None
    chosen = thinking_switches(on=_thinks(request)) | (request.chat_template_kwargs or {})
    told = tuple(block.text for block in request.system or () if not block.text.startswith(_BILLING))
    turns = [Turn("system", told)] if told else []
    last_user = max((index for index, each in enumerate(request.messages) if each.role == "user"), default=-1)
    for index, message in enumerate(request.messages):
        if not (message.role == "system" and message.clear_at == "next_user_message" and index < last_user):
            turns += turns_of(message, f"messages[{index}]")
    use = use or tools_of(request)
    variables = template_variables(chosen, effort=effort)
    return Conversation(turns, use.shown, variables, may_call=bool(use.tools))


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
        examples = "\n".join(json.dumps(each, ensure_ascii=False) for each in tool.input_examples)
        description = f"{description or ''}\n\nExamples of arguments:\n{examples}".strip()
    return ToolSpec(tool.name, description, tool.input_schema, tool.strict)


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
                raise InvalidRequest.at("tool_choice.name", "is missing: the type `tool` needs it")
            return Choice(required=True, only=[selected.name], parallel=parallel)
