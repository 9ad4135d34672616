"""`LLMSummaryGeneration`: a step and its details, short enough to be listened to."""

from llm_functionalities.caller import Context, Front
from llm_functionalities.prompts import alpaca
from llm_functionalities.workflows.fields import at, labelled
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
    if not (step.strip() or details.strip()):
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
        asked = [prompt(request.task_title, request.step_text, request.more_details)]
        return llm_pb2.SummaryGenerationResponse(summary=(await self._summaries(context, asked))[0])

    async def generate_summaries(
        self, request: llm_pb2.MultipleSummaryGenerationRequest, context: Context
    ) -> llm_pb2.MultipleSummaryGenerationResponse:
        titles, details = list(request.task_title), list(request.more_details)
        asked = [prompt(at(titles, i), step, at(details, i)) for i, step in enumerate(request.step_text)]
        return llm_pb2.MultipleSummaryGenerationResponse(summary=await self._summaries(context, asked))

    async def _summaries(self, context: Context, prompts: list[str | None]) -> list[str]:
        deadline = self._front.deadline(context)
        generation = self._front.generation(MAX_TOKENS)
        texts = await self._front.all_parsed(context, prompts, generation, deadline, parse)
        return [text or "" for text in texts]
