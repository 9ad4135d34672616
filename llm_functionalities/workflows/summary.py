"""`LLMSummaryGeneration`: a step and its details, short enough to be listened to."""

from collections.abc import Callable

from llm_functionalities.caller import Context, Front
from llm_functionalities.model import Question
from llm_functionalities.prompts import alpaca
from llm_functionalities.workflows.fields import at, is_blank, labelled
from llm_functionalities.workflows.sentences import speakable
from shared.stubs import llm_pb2, llm_pb2_grpc

MAX_TOKENS = 128
SENTENCES = 2
CHARACTERS = 350

INSTRUCTION = (
    "Write a short summary of the step for somebody who listens, in at most two sentences. Keep every amount, time and "
    "temperature that is needed to do it, and add nothing."
)


def prompt(title: str, step: str, details: str) -> str | None:
    """None when there is nothing to summarise."""
    if is_blank(step) and is_blank(details):
        return None
    return alpaca(INSTRUCTION, labelled(("Task", title), ("Step", step), ("Details", details)))


def parse(text: str) -> str | None:
    return speakable(text, sentences=SENTENCES, characters=CHARACTERS) or None


class LLMSummaryGeneration(llm_pb2_grpc.LLMSummaryGenerationServicer):
    def __init__(self, front: Front) -> None:
        self._front = front

    async def generate_summary(
        self, request: llm_pb2.SummaryGenerationRequest, context: Context
    ) -> llm_pb2.SummaryGenerationResponse:

        def ask(place: int) -> Question[str]:
            return Question(prompt(request.task_title, request.step_text, request.more_details), parse)

        return llm_pb2.SummaryGenerationResponse(summary=(await self._summaries(context, 1, ask))[0])

    async def generate_summaries(
        self, request: llm_pb2.MultipleSummaryGenerationRequest, context: Context
    ) -> llm_pb2.MultipleSummaryGenerationResponse:
        titles, steps, details = request.task_title, request.step_text, request.more_details

        def ask(place: int) -> Question[str]:
            return Question(prompt(at(titles, place), steps[place], at(details, place)), parse)

        return llm_pb2.MultipleSummaryGenerationResponse(summary=await self._summaries(context, len(steps), ask))

    async def _summaries(self, context: Context, count: int, ask: Callable[[int], Question[str]]) -> list[str]:
        deadline = self._front.deadline(context)
        answers = await self._front.answers(context, count, ask, self._front.generation(MAX_TOKENS), deadline)
        return [answer.value or "" for answer in answers]
