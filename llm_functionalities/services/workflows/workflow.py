"""A workflow: what one call asks the model, and the response that the answers make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from llm_functionalities.endpoint.call import Deadline
from llm_functionalities.endpoint.generation import Grammar
from llm_functionalities.errors import NotServed
from llm_functionalities.model.model import Answer, Question
from llm_functionalities.services.context import CallContext, ModelClient
from llm_functionalities.services.numbers import DECISIONS, decision_body, json_question
from shared.stubs import llm_pb2

T = TypeVar("T")


# Of a decision that counts: the probability that the model would write a label at all, and how sure it is.
LEAST_LABEL_MASS, LEAST_CONFIDENCE = 0.5, 0.5

# The share of the time that is left which a decision may take.
DECISION_SHARE = 0.3


@dataclass(frozen=True)
class FirstChoice:
    """A choice that is made before the answer is generated, where the model server has decisions.

    request: returns a request with one question, or None when there is nothing to ask. grammar: the form of the answer
    once a label is chosen.
    """

    request: Callable[[], llm_pb2.DecisionRequest | None]
    grammar: Callable[[str], Grammar]


@dataclass(frozen=True)
class Workflow(Generic[T]):
    """Questions 0 to `count` - 1 of one request, and its response.

    grammar: the form of the answers, which model servers that take no grammars need not keep. first: a choice that
    bounds them further.
    """

    ask: Callable[[int], Question[T]]
    respond: Callable[[Sequence[Answer[T]]], Message]
    max_tokens: int
    count: int = 1
    grammar: Grammar | None = None
    first: FirstChoice | None = None


async def run(method: Callable[[Any], Workflow[Any]], model: ModelClient, request: Any, context: CallContext) -> Any:
    """Returns the response to a call, by its deadline."""
    deadline = model.deadline(context, getattr(request, "timeout", 0))
    workflow = method(request)
    grammar = workflow.grammar
    if workflow.first is not None and (label := await _chosen(workflow.first, model, context, deadline)):
        grammar = workflow.first.grammar(label)
    generation = model.generation(workflow.max_tokens, grammar, grammar_is_optional=True)
    return workflow.respond(await model.answers(context, workflow.count, workflow.ask, generation, deadline))


async def _chosen(first: FirstChoice, model: ModelClient, context: CallContext, deadline: Deadline) -> str:
    """Returns the label of a choice that the model is sure of; "" where it is not, or the server has no decisions.

    The options are listed in several orders, so a model that prefers a place in the list is not sure.
    """
    if not model.decisions.worth_a_try():
        return ""

    def parse(response: dict[str, Any]) -> str:
        (answer,) = response["answers"]
        sure = answer["label_mass"] >= LEAST_LABEL_MASS and answer["confidence"] >= LEAST_CONFIDENCE
        return str(answer["choice"]) if sure else ""

    def ask(_: int) -> Question[str]:
        request = first.request()
        if request is None:
            return Question(None, str)
        return json_question(DECISIONS, decision_body(request) | {"normalization": "orders"}, parse)

    soon = deadline.within(DECISION_SHARE * deadline.remaining())
    (answer,) = await model.model.answers(
        1, ask, model.generation(0), soon, context.headers, models=context.models, counted=False
    )
    if answer.reason == NotServed.reason:
        model.decisions.missing()
    return answer.value or ""


def texts(answers: Sequence[Answer[str]]) -> list[str]:
    """Returns the texts of answers, empty where there is none."""
    return [answer.value or "" for answer in answers]
