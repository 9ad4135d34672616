"""What a chat request asks for, ready to be generated."""

from collections.abc import Sequence
from dataclasses import dataclass

from tgi_server.router.api.openai import check_sequences, generation_parameters
from tgi_server.router.conversation import message_text, render_conversation
from tgi_server.router.errors import InvalidRequest, InvalidTool
from tgi_server.router.schemas.chat import ChatRequest, Tool
from tgi_server.router.schemas.grammar import PlainText
from tgi_server.router.service import Service
from tgi_server.router.special_tokens import RenderedPrompt
from tgi_server.router.tool_grammar import chosen_tools, tool_grammar
from tgi_server.router.validation import CheckedRequest


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """tools: those that the answer may call. required: it must call one."""

    request: ChatRequest
    choices: int
    tools: Sequence[Tool]
    required: bool

    @property
    def logprobs(self) -> bool:
        return bool(self.request.logprobs)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    text: str
    checked: CheckedRequest


def plan_chat(service: Service, request: ChatRequest) -> ChatPlan:
    """Raises InvalidRequest."""
    choices = 1 if request.n is None else request.n
    check_sequences(choices, service.limits.max_client_batch_size, "`n`")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs`")
    tools, required = chosen_tools(request.tools, request.tool_choice)
    if tools and request.response_format is not None and not isinstance(request.response_format.root, PlainText):
        raise InvalidTool("`response_format` cannot be used together with `tools`")
    return ChatPlan(request, choices, tools, required)


async def prompt_with_tools(service: Service, plan: ChatPlan) -> ChatPrompt:
    """The prompt for an answer that calls a tool, or says that it calls none. Raises InvalidRequest."""
    prompt = await render_plan(service, plan)
    parameters = generation_parameters(plan.request, max_tokens=_max_tokens(plan.request))
    grammar = tool_grammar(plan.tools, required=plan.required)
    checked = await service.validator.check(
        prompt.text, parameters, add_special_tokens=False, grammar=grammar, rendered=prompt
    )
    return ChatPrompt(prompt.text, checked)


async def prompt_for_text(service: Service, request: ChatRequest) -> ChatPrompt:
    """The prompt for an answer in words, or in the form that `response_format` wants. Raises InvalidRequest."""
    prompt = await _render(service, request, ())
    parameters = generation_parameters(
        request,
        max_tokens=_max_tokens(request),
        grammar=request.response_format,
        top_n_tokens=request.top_logprobs or 0,
    )
    said = "\n".join(map(message_text, request.messages))
    checked = await service.validator.check(
        prompt.text, parameters, add_special_tokens=False, spans_of=said, rendered=prompt
    )
    return ChatPrompt(prompt.text, checked)


async def render_plan(service: Service, plan: ChatPlan) -> RenderedPrompt:
    """Returns the prompt. Raises InvalidRequest."""
    return await _render(service, plan.request, plan.tools)


async def _render(service: Service, request: ChatRequest, tools: Sequence[Tool]) -> RenderedPrompt:
    characters = sum(len(content.root) for message in request.messages if (content := message.content) is not None)
    return await service.threads.handle_text(
        characters,
        lambda: render_conversation(
            service.template, request.messages, tools, request.tool_prompt, service.special_tokens
        ),
    )


def _max_tokens(request: ChatRequest) -> int | None:
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
