"""Converts chat requests to conversations, and prepares conversations of all APIs for the scheduler."""

from collections.abc import Callable
from dataclasses import replace

from tgi_server.contract import GenerationOptions, Grammar
from tgi_server.router.answers.free_form import free_form_arguments, free_form_tool
from tgi_server.router.answers.reader import AnswerReader
from tgi_server.router.answers.tools import Choice, ClientTool, ToolKind, ToolSpec, ToolUse, chosen_tools
from tgi_server.router.api.admission import Admission
from tgi_server.router.api.routes.openai import openai_options, requested_form
from tgi_server.router.api.routes.prompt_images import check_images, with_images
from tgi_server.router.media.images import ImageSource
from tgi_server.router.options import Dialect
from tgi_server.router.prompt_source import PromptSource
from tgi_server.router.schemas.chat import ChatRequest, ImageChunk, Message, RefusalChunk, TextChunk
from tgi_server.router.schemas.chat_tools import (
    AllowedTools,
    FreeFormCall,
    NamedFreeForm,
    NamedTool,
    OfferedFreeForm,
    Tool,
    ToolCall,
    ToolChoice,
)
from tgi_server.router.service import Service
from tgi_server.router.submission import PreparedRequest
from tgi_server.router.text.conversation import (
    Conversation,
    PastCall,
    Turn,
    render_conversation,
    template_variables,
    thinking_switches,
    with_volatile_last,
)
from tgi_server.router.text.prompt_place import conversation_source
from tgi_server.router.text.special_tokens import RenderedPrompt

# A conversation, and the options of its answer.
Asked = tuple[Conversation, GenerationOptions]


def requested_chat(admission: Admission, request: ChatRequest) -> Asked:
    """Converts a request to a conversation and options. Takes time in proportion to its size. Raises InvalidRequest."""
    options = openai_options(admission, request, Dialect.CHAT)
    report = replace(options.report, logprobs=bool(request.logprobs))
    options = replace(options, report=report, grammar=requested_form(request))
    return conversation_of(request), options


async def prepare_chat(
    admission: Admission, dialect: Dialect, requested: Callable[[], Asked]
) -> tuple[Conversation, PreparedRequest]:
    """Prepares a conversation for the scheduler. Returns both. Raises InvalidRequest.

    requested: returns the conversation and its options; called in a thread.
    """
    service, size = admission.service, admission.size
    form = service.text.answer_form

    def prepare() -> tuple[
        Asked, Grammar | None, RenderedPrompt, bool, Callable[[], AnswerReader] | None, PromptSource
    ]:
        conversation, options = requested()
        shown, use, answer = conversation, conversation.use, options.grammar
        if options.thinking_token_budget == 0:  # most templates can turn off thinking
            shown = replace(shown, variables=thinking_switches(on=False) | dict(shown.variables))
        prompt = render(service, shown)
        thoughts = form.thoughts(answer)
        thinking = thoughts is not None and thoughts.open_in(prompt.text, conversation.begun)
        reader = form.readers(use, answer, thinking=thinking, prompt=prompt.text)
        grammar = form.grammar(use, answer, thinking=thinking)
        if not use.tools and service.preparer.may_add_grammar(options):
            grammar = form.without_calls(use, thinking=thinking)
        return (conversation, options), grammar, prompt, thinking, reader, conversation_source(shown)

    (conversation, options), grammar, prompt, thinking, reader, source = await service.text.threads.run(size, prepare)
    prompt = await with_images(admission, prompt, conversation.images, options.cache_salt)
    prepared = await service.preparer.prepare(
        prompt,
        replace(options, grammar=grammar),
        dialect,
        client=admission.owner,
        add_special_tokens=False,
        spans_of=conversation.said,
        size=size,
        thinking=thinking,
        source=source,
    )
    use, unenforced = conversation.use, prepared.unenforced
    if use.tools and not form.enforces(use, options.grammar):
        unenforced = (*use.formats, *unenforced)
    return conversation, replace(prepared, reader=reader, unenforced=unenforced)


def render(service: Service, conversation: Conversation) -> RenderedPrompt:
    """Renders the prompt, with placeholders for images. Raises InvalidRequest, also if the model reads no images."""
    check_images(service, conversation.images)
    tool_prompt = service.text.answer_form.tool_prompt
    return render_conversation(service.text.template, conversation, service.text.special_tokens, tool_prompt)


async def rendered(admission: Admission, conversation: Callable[[], Conversation]) -> RenderedPrompt:
    """Returns the prompt of a conversation with its images. Raises InvalidRequest."""
    service = admission.service

    def make() -> tuple[RenderedPrompt, Conversation]:
        made = conversation()
        return render(service, made), made

    prompt, made = await service.text.threads.run(admission.size, make)
    return await with_images(admission, prompt, made.images)


def tools_of(request: ChatRequest) -> ToolUse:
    """Returns the tools that the answer may call. Raises InvalidTool."""
    tools: list[ToolSpec] = []
    client_tools: dict[str, ClientTool] = {}
    formats: list[str] = []
    for index, tool in enumerate(request.tools or ()):
        match tool.root:
            case Tool(function=each):
                tools.append(ToolSpec(each.name, each.description, each.arguments, each.strict))
            case OfferedFreeForm(custom=each):
                form = each.format and each.format.grammar
                tools.append(
                    free_form_tool(each.name, each.description, *((form.syntax, form.definition) if form else ()))
                )
                client_tools[each.name] = ClientTool(each.name, ToolKind.FREE_FORM)
                formats += [f"tools[{index}].custom.format ({form.syntax})"] if form else []
    return chosen_tools(tools, _choice(request), client_tools, formats)


def conversation_of(request: ChatRequest) -> Conversation:
    """Returns the conversation that a request asks to answer. Raises InvalidRequest."""
    return Conversation(
        with_volatile_last([_turn(message, f"messages[{index}]") for index, message in enumerate(request.messages)]),
        tools_of(request),
        template_variables(request.chat_template_kwargs, effort=request.reasoning_effort, documents=request.documents),
        request.tool_prompt,
        request.add_generation_prompt,
        request.continue_final_message,
        request.include_reasoning,
    )


def _turn(message: Message, place: str) -> Turn:
    calls = (_past_call(call.root) for call in message.tool_calls or ())
    parts, volatile = _parts(message, place)
    return Turn(
        message.role,
        parts,
        message.reasoning_content,
        tuple(calls),
        message.name,
        message.tool_call_id,
        place,
        volatile,
    )


def _past_call(call: ToolCall | FreeFormCall) -> PastCall:
    if isinstance(call, FreeFormCall):
        return PastCall(call.id, call.custom.name, free_form_arguments(call.custom.input))
    return PastCall(call.id, call.function.name, call.function.arguments, call.type)


def _parts(message: Message, place: str) -> tuple[tuple[str | ImageSource, ...], tuple[str, ...]]:
    """Returns the texts and images of a message, and its volatile texts. place: its field in the request."""
    content = message.content.root if message.content is not None else message.refusal or ""
    if isinstance(content, str):
        return ((), (content,)) if message.volatile else ((content,), ())
    parts: list[str | ImageSource] = []
    volatile: list[str] = []
    for index, chunk in enumerate(content):
        match chunk.root:
            case ImageChunk(image_url=image):
                parts.append(ImageSource(image.url, f"{place}.content[{index}]", image.detail))
            case TextChunk(text=text, volatile=moved):
                (volatile if moved or message.volatile else parts).append(text)
            case RefusalChunk(refusal=refusal):
                parts.append(refusal)
    return tuple(parts), tuple(volatile)


def _choice(request: ChatRequest) -> Choice | None:
    """Returns the choice of tools; None: no tool may be called."""
    match (request.tool_choice or ToolChoice("auto")).root:
        case "none":
            return None
        case NamedTool(function=function) | NamedFreeForm(custom=function):
            return Choice(required=True, only=[function.name], parallel=False)
        case AllowedTools(allowed_tools=allowed):
            names = [tool.function.name if isinstance(tool, NamedTool) else tool.custom.name for tool in allowed.tools]
            return Choice(allowed.mode == "required", names, request.parallel_tool_calls)
        case mode:
            return Choice(mode == "required", parallel=request.parallel_tool_calls)
