"""`LLMProactiveQuestionGeneration`: a question that keeps the conversation going while the user works on a step."""

from llm_functionalities.endpoint.generation import Grammar
from llm_functionalities.model.model import Question
from llm_functionalities.services.prompts import alpaca, is_blank, labelled, value_at
from llm_functionalities.services.workflows.answers import CLOSING, plain, split
from llm_functionalities.services.workflows.workflow import Workflow, texts
from shared.stubs import llm_pb2

MAX_TOKENS = 64
CHARACTERS = 160

INSTRUCTION = (
    "Ask the user one short question that fits the current step: about how the work goes, or about what has been made "
    "so far. It must be easy to answer, and must not ask for what the steps already say."
)

QUESTION = Grammar(regex=r"[A-Z][^?!.\n\"]{8,150}\?")


def prompt(title: str, previous: str, current: str) -> str | None:
    """Returns the prompt; None if there is nothing to ask about."""
    if is_blank(title) and is_blank(previous) and is_blank(current):
        return None
    return alpaca(INSTRUCTION, labelled(("Task", title), ("Previous steps", previous), ("Current step", current)))


def parse(text: str) -> str | None:
    """Returns the first question of an answer; None if it has none, or if the question is too long."""
    questions = (sentence for sentence in split(plain(text)) if sentence.rstrip(CLOSING).endswith("?"))
    return next((question for question in questions if len(question) <= CHARACTERS), None)


def generate_proactive_question(request: llm_pb2.ProactiveQuestionGenerationRequest) -> Workflow[str]:
    """Returns a workflow that asks a question for each title, in their order; empty where the model gives none."""
    titles, previous, current = request.task_title, request.previous_steps, request.current_step
    kind = llm_pb2.ExtraInfo.QUESTION
    return Workflow(
        lambda place: Question(
            prompt(value_at(titles, place), value_at(previous, place), value_at(current, place)), parse
        ),
        lambda answers: llm_pb2.ProactiveQuestionGenerationResponse(
            questions=[llm_pb2.ExtraInfo(type=kind, text=text) for text in texts(answers)]
        ),
        MAX_TOKENS,
        count=max(len(titles), len(current)),
        grammar=QUESTION,
    )
