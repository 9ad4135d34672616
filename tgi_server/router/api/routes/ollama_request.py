"""Converts requests of Ollama's API to conversations."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tgi_server.contract import GenerationOptions, Grammar
from tgi_server.router.answers.tools import Choice, ToolSpec, ToolUse, chosen_tools
from tgi_server.router.api.admission import Admission
from tgi_server.router.api.routes.chat_prompt import Asked, prepare_chat
from tgi_server.router.api.routes.openai import named_adapter
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.media.images import ImageSource
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGenerationRequest,
    OllamaPastCall,
    OllamaTurn,
)
from tgi_server.router.service import Service
from tgi_server.router.submission import PreparedRequest
from tgi_server.router.text.conversation import Conversation, PastCall, Turn, template_variables, thinking_switches
from tgi_server.router.text.grammar import ANY_OBJECT, WHOLE_SCHEMA, json_grammar
from tgi_server.router.text.special_tokens import RenderedPrompt

_TAG = ":latest"


def without_tag(service: Service, model: str | None) -> str | None:
    """Returns a model's name without the tag `:latest`, which Ollama's clients add to names without a tag."""
    return model if model is None or service.is_served(model) else model.removesuffix(_TAG)


async def prepare_ollama(
    admission: Admission, request: OllamaChatRequest | OllamaGenerateRequest
) -> tuple[Conversation, PreparedRequest]:
    """Returns a request's conversation, and prepares it for the scheduler. Raises InvalidRequest."""
    if not isinstance(request, OllamaGenerateRequest) or not request.raw:
        return await prepare_chat(admission, Dialect.OLLAMA, lambda: _requested(admission, request))
    for name in ("system", "images", "think"):
        if getattr(request, name):
            raise InvalidRequest.at(name, "cannot be used with `raw`")
    service, size = admission.service, admission.size
    options = await service.text.threads.handle_text(size, lambda: _options(admission, request))
    prompt = RenderedPrompt(request.prompt)
    prepared = await service.preparer.prepare(prompt, options, Dialect.OLLAMA, client=admission.owner, size=size)
    return Conversation(()), prepared


def _requested(admission: Admission, request: OllamaChatRequest | OllamaGenerateRequest) -> Asked:
    """Converts a request to a conversation and options. Takes time in proportion to its size. Raises InvalidRequest."""
    think = request.think
    if think and admission.service.text.answer_form.thoughts(None) is None:
        raise InvalidRequest.at("think", "cannot be used: this model does not support thinking")
    options = _options(admission, request)
    if isinstance(request, OllamaChatRequest):
        offered = (tool.function for tool in request.tools)
        tools = [ToolSpec(each.name, each.description, each.arguments, each.strict) for each in offered]
        use, turns = chosen_tools(tools, Choice()), list(_turns(request.messages))
    else:
        use = ToolUse()
        turns = [Turn("system", (request.system,), place="system")] if request.system else []
        turns.append(Turn("user", (*_images(request.images, "images"), request.prompt), place="prompt"))
    switches = {} if think is None else thinking_switches(on=bool(think))
    variables = template_variables(switches, effort=think if isinstance(think, str) else None)
    return Conversation(turns, use, variables, show_thoughts=think is not False), options


def _options(admission: Admission, request: OllamaGenerationRequest) -> GenerationOptions:
    """Returns the generation options, including the grammar. Raises InvalidRequest, or NoSuchModel."""
    service = admission.service
    options = admission.options(request.options, Dialect.OLLAMA, streams=request.stream)
    if (tops := request.top_logprobs) > (most := service.options.limits_of(Dialect.OLLAMA).max_top_n_tokens):
        raise InvalidRequest.at("top_logprobs", f"is {tops}; it must be at most {most}")
    report = replace(options.report, logprobs=request.logprobs, top_n_tokens=tops if request.logprobs else 0)
    adapter_id = named_adapter(service, without_tag(service, request.model))
    return replace(options, adapter_id=adapter_id, report=report, grammar=_form(request))


def _form(request: OllamaGenerationRequest) -> Grammar | None:
    if request.format is None or request.format == "":
        return None
    if request.format == "json":
        return json_grammar(ANY_OBJECT, place="format")
    return json_grammar(request.format, (WHOLE_SCHEMA,), place="format")


def _turns(messages: Sequence[OllamaTurn]) -> Iterator[Turn]:
    """Yields the messages as turns.

    Tool results without an id are matched with the preceding calls in order, as most of Ollama's clients do not use
    ids.
    """
    made = 0
    open_calls: list[PastCall] = []
    for index, message in enumerate(messages):
        calls = []
        for call in message.tool_calls:
            made += 1
            calls.append(_past_call(call, made))
        open_calls += calls
        call_id = message.tool_call_id
        if message.role == "tool" and (answered := _answered(open_calls, message)) is not None:
            open_calls.remove(answered)
            call_id = answered.id
        images = _images(message.images, f"messages[{index}].images")
        yield Turn(message.role, (*images, message.content), message.thinking, tuple(calls), message.tool_name, call_id)


def _past_call(call: OllamaPastCall, number: int) -> PastCall:
    """Returns a call; if it has no id, with one of nine characters, which some templates require."""
    return PastCall(call.id or f"call{number:05d}", call.function.name, call.function.arguments)


def _answered(calls: Sequence[PastCall], result: OllamaTurn) -> PastCall | None:
    """Returns the call to which a result belongs; None if there is none, or it names an unknown one."""
    if result.tool_call_id is not None:
        return next((call for call in calls if call.id == result.tool_call_id), None)
    return next((call for call in calls if result.tool_name in (None, call.name)), None)


def _images(images: Sequence[str], place: str) -> Iterator[ImageSource]:
    return (ImageSource(f"data:;base64,{data}", f"{place}[{index}]") for index, data in enumerate(images))
