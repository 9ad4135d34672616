"""A workflow: the questions that one call asks the model, and the response made from the answers."""

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


# The least probability that the model writes a label at all, and the least confidence, of a decision that is used.
LEAST_LABEL_MASS, LEAST_CONFIDENCE = 0.5, 0.5

# The most time that a decision may take, as a share of the time until the deadline.
DECISION_SHARE = 0.3


@dataclass(frozen=True)
class FirstChoice:
    """A decision that is made before the answer is generated, if the model server supports decisions.

    request: returns a request with one question, or None when there is nothing to ask. grammar: returns the grammar of
    an answer with the chosen label.
    """

    request: Callable[[], llm_pb2.DecisionRequest | None]
    grammar: Callable[[str], Grammar]


@dataclass(frozen=True)
class Workflow(Generic[T]):
    """Questions 0 to `count` - 1 of one request, and a function that makes the response from their answers.

    grammar: the grammar of the answers. Model servers that do not support grammars may ignore it. first: a decision
    that restricts the answers further.
    """

    ask: Callable[[int], Question[T]]
    respond: Callable[[Sequence[Answer[T]]], Message]
    max_tokens: int
    count: int = 1
    grammar: Grammar | None = None
    first: FirstChoice | None = None


async def run(method: Callable[[Any], Workflow[Any]], model: ModelClient, request: Any, context: CallContext) -> Any:
    """Runs the workflow that `method` returns for `request`, and returns its response by the deadline."""
    deadline = model.deadline(context, getattr(request, "timeout", 0))
    workflow = method(request)
    grammar = workflow.grammar
    if workflow.first is not None and (label := await _chosen(workflow.first, model, context, deadline)):
        grammar = workflow.first.grammar(label)
    generation = model.generation(workflow.max_tokens, grammar, grammar_is_optional=True)
    return workflow.respond(await model.answers(context, workflow.count, workflow.ask, generation, deadline))


async def _chosen(first: FirstChoice, model: ModelClient, context: CallContext, deadline: Deadline) -> str:
    """Returns the label that the model chooses; "" if it is not sure, or if the server does not support decisions.

    The options are listed in several orders, so that a model that prefers one place in the list does not count as sure.
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
    """Returns the texts of the answers; "" for a missing one."""
    return [answer.value or "" for answer in answers]
