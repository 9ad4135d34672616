"""A workflow: what one call asks the model, and the response that the answers make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from llm_functionalities.endpoint.generation import Grammar
from llm_functionalities.model.model import Answer, Question
from llm_functionalities.services.context import CallContext, ModelClient

T = TypeVar("T")


@dataclass(frozen=True)
class Workflow(Generic[T]):
    """Questions 0 to `count` - 1 of one request, and its response.

    grammar: the form of the answers, which model servers that take no grammars need not keep.
    """

    ask: Callable[[int], Question[T]]
    respond: Callable[[Sequence[Answer[T]]], Message]
    max_tokens: int
    count: int = 1
    grammar: Grammar | None = None


async def run(method: Callable[[Any], Workflow[Any]], model: ModelClient, request: Any, context: CallContext) -> Any:
    """Returns the response to a call, by its deadline."""
    deadline = model.deadline(context, getattr(request, "timeout", 0))
    workflow = method(request)
    generation = model.generation(workflow.max_tokens, workflow.grammar, grammar_is_optional=True)
    return workflow.respond(await model.answers(context, workflow.count, workflow.ask, generation, deadline))


def texts(answers: Sequence[Answer[str]]) -> list[str]:
    """Returns the texts of answers, empty where there is none."""
    return [answer.value or "" for answer in answers]
