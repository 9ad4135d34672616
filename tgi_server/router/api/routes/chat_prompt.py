"""A chat that is to be answered, whichever interface it came by, and its prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tgi_server.contract import GenerationOptions
from tgi_server.router.answers.free_form import ClientTool, ToolKind, free_form_arguments, free_form_tool
from tgi_server.router.answers.reader import AnswerReader
from tgi_server.router.answers.tools import Choice, ToolSpec, ToolUse, chosen_tools
from tgi_server.router.api.admission import Admission
from tgi_server.router.api.routes.openai import openai_options, requested_form
from tgi_server.router.api.routes.prompt_images import check_images, with_images
from tgi_server.router.media.images import ImageSource
from tgi_server.router.options import Dialect
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
)
from tgi_server.router.text.special_tokens import RenderedPrompt


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat that is to be answered.

    use: the tools that the answer may call. show_thoughts: they are sent. client_tools: tools of `use` that are not
    plain functions to the client, by the names that the model knows. formats: the grammars of free texts, each as a
    line. reader: makes what parses an answer, once there is a prompt; None: all of an answer is text.
    """

    dialect: Dialect
    conversation: Conversation
    use: ToolUse
    options: GenerationOptions
    show_thoughts: bool = True
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict)
    formats: Sequence[str] = ()
    reader: Callable[[], AnswerReader] | None = None


def requested_chat(admission: Admission, request: ChatRequest) -> Chat:
    """Returns what the request asks for. Takes time in proportion to its size. Raises InvalidRequest."""
    options = openai_options(admission, request, Dialect.CHAT)
    report = replace(options.report, logprobs=bool(request.logprobs))
    options = replace(options, report=report, grammar=requested_form(request))
    use = tools_of(request)
    conversation = conversation_of(request, use)
    tools, formats = free_form_tools(request)
    return Chat(Dialect.CHAT, conversation, use, options, request.include_reasoning, tools, formats)


async def prepare_chat(admission: Admission, requested: Callable[[], Chat]) -> tuple[Chat, PreparedRequest]:
    """Returns a chat with the reader of its answer, and what the scheduler takes. Raises InvalidRequest."""
    service, size = admission.service, admission.size
    form = service.text.answer_form

    def prepare() -> tuple[Chat, RenderedPrompt, GenerationOptions, bool]:
        chat = requested()
        conversation = chat.conversation
        if chat.options.thinking_token_budget == 0:  # most templates can say so themselves
            conversation = replace(conversation, variables=thinking_switches(on=False) | dict(conversation.variables))
        prompt = render(service, conversation)
        answer = chat.options.grammar
        thoughts = form.thoughts(answer)
        thinking = thoughts is not None and thoughts.open_in(prompt.text, conversation.begun)
        reader = form.readers(chat.use, answer, thinking=thinking, prompt=prompt.text)
        grammar = form.grammar(chat.use, answer, thinking=thinking)
        if not chat.use.tools and service.preparer.may_add_grammar(chat.options):
            grammar = form.without_calls(chat.use, thinking=thinking)
        return replace(chat, reader=reader), prompt, replace(chat.options, grammar=grammar), thinking

    chat, prompt, options, thinking = await service.text.threads.run(size, prepare)
    prompt = await with_images(admission, prompt, chat.conversation.images, options.cache_salt)
    prepared = await service.preparer.prepare(
        prompt,
        options,
        chat.dialect,
        client=admission.owner,
        add_special_tokens=False,
        spans_of=chat.conversation.said,
        size=size,
        thinking=thinking,
    )
    if chat.use.tools and not form.enforces(chat.use, chat.options.grammar):
        prepared = replace(prepared, unenforced=(*chat.formats, *prepared.unenforced))
    return chat, prepared


def render(service: Service, conversation: Conversation) -> RenderedPrompt:
    """Returns the prompt, with placeholders for images. Raises InvalidRequest, also if the model reads none."""
    check_images(service, conversation.images)
    tool_prompt = service.text.answer_form.tool_prompt
    return render_conversation(service.text.template, conversation, service.text.special_tokens, tool_prompt)


async def rendered(admission: Admission, conversation: Callable[[], Conversation]) -> RenderedPrompt:
    """Returns the prompt of a conversation with its images. Raises InvalidRequest, and ClientGone."""
    service = admission.service

    def make() -> tuple[RenderedPrompt, Conversation]:
        made = conversation()
        return render(service, made), made

    prompt, made = await service.text.threads.run(admission.size, make)
    return await with_images(admission, prompt, made.images)


def tools_of(request: ChatRequest) -> ToolUse:
    """Returns the tools that the answer may call. Raises InvalidTool."""
    tools: list[ToolSpec] = []
    for tool in request.tools or ():
        match tool.root:
            case Tool(function=each):
                tools.append(ToolSpec(each.name, each.description, each.arguments, each.strict))
            case OfferedFreeForm(custom=each):
                form = each.format and each.format.grammar
                grammar = (form.syntax, form.definition) if form else ()
                tools.append(free_form_tool(each.name, each.description, *grammar))
    return chosen_tools(tools, _choice(request))


def free_form_tools(request: ChatRequest) -> tuple[dict[str, ClientTool], list[str]]:
    """Returns the tools whose input is text, and the grammars of their texts, each as a line."""
    tools: dict[str, ClientTool] = {}
    formats: list[str] = []
    for index, tool in enumerate(request.tools or ()):
        if isinstance(each := tool.root, OfferedFreeForm):
            tools[each.custom.name] = ClientTool(each.custom.name, ToolKind.FREE_FORM)
            if each.custom.format and each.custom.format.grammar:
                formats.append(f"tools[{index}].custom.format ({each.custom.format.grammar.syntax})")
    return tools, formats


def conversation_of(request: ChatRequest, use: ToolUse) -> Conversation:
    """Returns the conversation. use: the tools that are shown. Raises InvalidRequest."""
    return Conversation(
        [_turn(message, f"messages[{index}]") for index, message in enumerate(request.messages)],
        use.shown,
        template_variables(request.chat_template_kwargs, effort=request.reasoning_effort, documents=request.documents),
        request.tool_prompt,
        request.add_generation_prompt,
        request.continue_final_message,
        may_call=bool(use.tools),
    )


def _turn(message: Message, place: str) -> Turn:
    calls = (_past_call(call.root) for call in message.tool_calls or ())
    return Turn(
        message.role,
        _parts(message, place),
        message.reasoning_content,
        tuple(calls),
        message.name,
        message.tool_call_id,
    )


def _past_call(call: ToolCall | FreeFormCall) -> PastCall:
    if isinstance(call, FreeFormCall):
        return PastCall(call.id, call.custom.name, free_form_arguments(call.custom.input))
    return PastCall(call.id, call.function.name, call.function.arguments, call.type)


def _parts(message: Message, place: str) -> tuple[str | ImageSource, ...]:
    """Returns the texts and images of a message. place: where it stands in the request."""
    content = message.content.root if message.content is not None else message.refusal or ""
    if isinstance(content, str):
        return (content,)
    parts: list[str | ImageSource] = []
    for index, chunk in enumerate(content):
        match chunk.root:
            case ImageChunk(image_url=image):
                parts.append(ImageSource(image.url, f"{place}.content[{index}]", image.detail))
            case TextChunk(text=text):
                parts.append(text)
            case RefusalChunk(refusal=refusal):
                parts.append(refusal)
    return tuple(parts)


def _choice(request: ChatRequest) -> Choice | None:
    """Returns the choice of tools; None: no tool may be called."""
    match (request.tool_choice or ToolChoice("auto")).root:
        case "none":
            return None
        case NamedTool(function=function) | NamedFreeForm(custom=function):
            return Choice(required=True, only=[function.name], parallel=False)
        case AllowedTools(allowed_tools=allowed):
            names = [each.function.name if isinstance(each, NamedTool) else each.custom.name for each in allowed.tools]
            return Choice(allowed.mode == "required", names, request.parallel_tool_calls)
        case mode:
            return Choice(mode == "required", parallel=request.parallel_tool_calls)
