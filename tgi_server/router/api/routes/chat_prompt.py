"""A chat request checked and rendered: its plan, and the prompts for a call of a tool or for a text."""

from collections.abc import Sequence
from dataclasses import dataclass

from tgi_server.router.api.routes.openai import check_sequences, generation_parameters
from tgi_server.router.errors import InvalidRequest, InvalidTool
from tgi_server.router.schemas.chat import ChatRequest, Tool
from tgi_server.router.schemas.grammar import PlainText
from tgi_server.router.service import Service
from tgi_server.router.text.chat_template import message_text, render_conversation
from tgi_server.router.text.special_tokens import RenderedPrompt
from tgi_server.router.text.tools import chosen_tools, tool_grammar
from tgi_server.router.text.validation import CheckedRequest


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat request that keeps the rules.

    tools: those that the answer may call. required: it must call one. size: bytes of the request.
    """

    request: ChatRequest
    size: int
    choices: int
    tools: Sequence[Tool]
    required: bool

    @property
    def logprobs(self) -> int | None:
        """How many alternatives are told of each token; None: no log-probabilities are."""
        return (self.request.top_logprobs or 0) if self.request.logprobs else None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as text, and as what the scheduler takes."""

    text: str
    checked: CheckedRequest


def plan_chat(service: Service, request: ChatRequest, size: int) -> ChatPlan:
    """Returns what the request asks for. Raises InvalidRequest."""
    choices = 1 if request.n is None else request.n
    limits = service.openai_limits
    check_sequences(choices, limits.max_client_batch_size, "`n`")
    if (request.top_logprobs or 0) > limits.max_top_n_tokens:
        raise InvalidRequest(f"`top_logprobs` must be 0 to {limits.max_top_n_tokens}, not {request.top_logprobs}")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs`")
    tools, required = chosen_tools(request.tools, request.tool_choice)
    if tools and request.response_format is not None and not isinstance(request.response_format.root, PlainText):
        raise InvalidTool("`response_format` cannot be used together with `tools`")
    return ChatPlan(request, size, choices, tools, required)


async def prompt_with_tools(service: Service, plan: ChatPlan) -> ChatPrompt:
    """Returns the prompt for an answer that calls a tool, or says that it calls none. Raises InvalidRequest."""
    prompt = await render_plan(service, plan)
    parameters = generation_parameters(plan.request, service, max_tokens=_max_tokens(plan.request))
    grammar = await service.threads.run(plan.size, lambda: tool_grammar(plan.tools, required=plan.required))
    check = service.validator.check
    checked = await check(
        prompt, parameters, add_special_tokens=False, grammar=grammar, size=plan.size, limits=service.openai_limits
    )
    return ChatPrompt(prompt.text, checked)


async def prompt_for_text(service: Service, request: ChatRequest, size: int) -> ChatPrompt:
    """Returns the prompt for an answer in words, or in the form that `response_format` wants. Raises InvalidRequest.

    size: bytes of the request.
    """
    parameters = generation_parameters(
        request,
        service,
        max_tokens=_max_tokens(request),
        top_n_tokens=request.top_logprobs or 0,
    )

    def render() -> tuple[RenderedPrompt, str]:
        return _render(service, request, ()), "\n".join(map(message_text, request.messages))

    prompt, said = await service.threads.run(size, render)
    check = service.validator.check
    limits = service.openai_limits
    checked = await check(prompt, parameters, add_special_tokens=False, spans_of=said, size=size, limits=limits)
    return ChatPrompt(prompt.text, checked)


async def render_plan(service: Service, plan: ChatPlan) -> RenderedPrompt:
    """Returns the prompt. Raises InvalidRequest."""
    return await service.threads.run(plan.size, lambda: _render(service, plan.request, plan.tools))


def _render(service: Service, request: ChatRequest, tools: Sequence[Tool]) -> RenderedPrompt:
    return render_conversation(service.template, request, tools, service.special_tokens)


def _max_tokens(request: ChatRequest) -> int | None:
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
