"""A chat request checked and rendered: its plan, and the prompt."""

from collections.abc import Callable
from dataclasses import dataclass

from tgi_server.contract import Grammar
from tgi_server.router.api.routes.openai import check_sequences, generation_parameters
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.generate import GenerateParameters
from tgi_server.router.service import Service
from tgi_server.router.text.answer_reader import AnswerReader
from tgi_server.router.text.conversation import message_text, render_conversation
from tgi_server.router.text.grammar import requested_grammar
from tgi_server.router.text.special_tokens import RenderedPrompt
from tgi_server.router.text.tools import ToolUse, chosen_tools
from tgi_server.router.text.validation import CheckedRequest


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat request that keeps the rules. size: bytes of the request."""

    request: ChatRequest
    size: int
    choices: int

    @property
    def logprobs(self) -> int | None:
        """The number of alternatives that are told of each token, or None where no log-probabilities are told."""
        return (self.request.top_logprobs or 0) if self.request.logprobs else None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as text, and as what the scheduler takes.

    reader: makes what takes an answer apart; None: all of an answer is text.
    """

    text: str
    checked: CheckedRequest
    reader: Callable[[], AnswerReader] | None


def plan_chat(service: Service, request: ChatRequest, size: int) -> ChatPlan:
    """Returns what the request asks for. Raises InvalidRequest."""
    choices = 1 if request.n is None else request.n
    limits = service.openai_limits
    check_sequences(choices, limits.max_client_batch_size, "`n`")
    if (request.top_logprobs or 0) > limits.max_top_n_tokens:
        raise InvalidRequest(f"`top_logprobs` must be 0 to {limits.max_top_n_tokens}, not {request.top_logprobs}")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs`")
    return ChatPlan(request, size, choices)


async def prompt_for_chat(service: Service, plan: ChatPlan) -> ChatPrompt:
    """Returns the prompt, and the grammar of the answer. Raises InvalidRequest."""
    request, form = plan.request, service.answer_form

    def prepare() -> tuple[RenderedPrompt, str, GenerateParameters, Grammar | None, Callable[[], AnswerReader] | None]:
        parameters = generation_parameters(
            request, service, max_tokens=request.token_limit, top_n_tokens=request.top_logprobs or 0
        )
        use = _tools(request)
        prompt = _render(service, request, use)
        answer = requested_grammar(parameters.grammar)
        thoughts = form.thoughts(answer)
        thinking = thoughts is not None and thoughts.open_in(prompt.text)
        said = "\n".join(map(message_text, request.messages))
        readers = form.readers(use, answer, thinking=thinking)
        return prompt, said, parameters, form.grammar(use, answer, thinking=thinking), readers

    prompt, said, parameters, grammar, readers = await service.threads.run(plan.size, prepare)
    checked = await service.validator.check(
        prompt,
        parameters,
        add_special_tokens=False,
        grammar=grammar,
        spans_of=said,
        size=plan.size,
        limits=service.openai_limits,
    )
    return ChatPrompt(prompt.text, checked, readers)


async def render_plan(service: Service, plan: ChatPlan) -> RenderedPrompt:
    """Returns the prompt. Raises InvalidRequest."""
    return await service.threads.run(plan.size, lambda: _render(service, plan.request, _tools(plan.request)))


def _tools(request: ChatRequest) -> ToolUse:
    return chosen_tools(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)


def _render(service: Service, request: ChatRequest, use: ToolUse) -> RenderedPrompt:
    tool_prompt = service.answer_form.tool_prompt
    return render_conversation(service.template, request, use.tools, service.special_tokens, tool_prompt)
