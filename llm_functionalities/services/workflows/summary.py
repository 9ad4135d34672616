"""`LLMSummaryGeneration`: a step and its details, short enough to be listened to."""

from llm_functionalities.model.model import Question
from llm_functionalities.services.prompts import alpaca, is_blank, labelled, value_at
from llm_functionalities.services.workflows.answers import speech_parser
from llm_functionalities.services.workflows.workflow import Workflow, texts
from shared.stubs import llm_pb2

MAX_TOKENS = 128
SENTENCES = 2
CHARACTERS = 350

INSTRUCTION = (
    "Write a short summary of the step for somebody who listens, in at most two sentences. Keep every amount, time and "
    "temperature that is needed to do it, and add nothing."
)

parse = speech_parser(sentences=SENTENCES, characters=CHARACTERS)


def prompt(title: str, step: str, details: str) -> str | None:
    """Returns the prompt; None if there is nothing to summarize."""
    if is_blank(step) and is_blank(details):
        return None
    return alpaca(INSTRUCTION, labelled(("Task", title), ("Step", step), ("Details", details)))


def generate_summary(request: llm_pb2.SummaryGenerationRequest) -> Workflow[str]:
    return Workflow(
        lambda _: Question(prompt(request.task_title, request.step_text, request.more_details), parse),
        lambda answers: llm_pb2.SummaryGenerationResponse(summary=answers[0].value or ""),
        MAX_TOKENS,
    )


def generate_summaries(request: llm_pb2.MultipleSummaryGenerationRequest) -> Workflow[str]:
    titles, steps, details = request.task_title, request.step_text, request.more_details
    return Workflow(
        lambda place: Question(prompt(value_at(titles, place), steps[place], value_at(details, place)), parse),
        lambda answers: llm_pb2.MultipleSummaryGenerationResponse(summary=texts(answers)),
        MAX_TOKENS,
        count=len(steps),
    )
