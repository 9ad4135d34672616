"""`LLMSummaryGeneration`: a step and its details, short enough to be listened to."""

from collections.abc import Callable

from llm_functionalities.model.model import Question
from llm_functionalities.services.context import CallContext, ModelClient
from llm_functionalities.services.prompts import alpaca, is_blank, labelled, value_at
from llm_functionalities.services.workflows.answers import speech_parser
from shared.stubs import llm_pb2, llm_pb2_grpc

MAX_TOKENS = 128
SENTENCES = 2
CHARACTERS = 350

INSTRUCTION = (
    "Write a short summary of the step for somebody who listens, in at most two sentences. Keep every amount, time and "
    "temperature that is needed to do it, and add nothing."
)

parse = speech_parser(sentences=SENTENCES, characters=CHARACTERS)


def prompt(title: str, step: str, details: str) -> str | None:
    """Returns None when there is nothing to summarise."""
    if is_blank(step) and is_blank(details):
        return None
    return alpaca(INSTRUCTION, labelled(("Task", title), ("Step", step), ("Details", details)))


class LLMSummaryGeneration(llm_pb2_grpc.LLMSummaryGenerationServicer):
    def __init__(self, model: ModelClient) -> None:
        self._model = model

    async def generate_summary(
        self, request: llm_pb2.SummaryGenerationRequest, context: CallContext
    ) -> llm_pb2.SummaryGenerationResponse:

        def ask(place: int) -> Question[str]:
            return Question(prompt(request.task_title, request.step_text, request.more_details), parse)

        return llm_pb2.SummaryGenerationResponse(summary=(await self._summaries(context, 1, ask))[0])

    async def generate_summaries(
        self, request: llm_pb2.MultipleSummaryGenerationRequest, context: CallContext
    ) -> llm_pb2.MultipleSummaryGenerationResponse:
        titles, steps, details = request.task_title, request.step_text, request.more_details

        def ask(place: int) -> Question[str]:
            return Question(prompt(value_at(titles, place), steps[place], value_at(details, place)), parse)

        return llm_pb2.MultipleSummaryGenerationResponse(summary=await self._summaries(context, len(steps), ask))

    async def _summaries(self, context: CallContext, count: int, ask: Callable[[int], Question[str]]) -> list[str]:
        deadline = self._model.deadline(context)
        answers = await self._model.answers(context, count, ask, self._model.generation(MAX_TOKENS), deadline)
        return [answer.value or "" for answer in answers]
