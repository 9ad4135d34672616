"""`LLMDescriptionGeneration`: a task introduced by its title and what it needs."""

from collections.abc import Callable

from llm_functionalities.caller import Context, Front
from llm_functionalities.model import Question
from llm_functionalities.prompts import alpaca
from llm_functionalities.workflows.fields import at, is_blank, labelled
from llm_functionalities.workflows.sentences import speakable
from shared.stubs import llm_pb2, llm_pb2_grpc

MAX_TOKENS = 128
SENTENCES = 2
CHARACTERS = 400

INSTRUCTION = (
    "Write an appealing description of this recipe or project in one or two sentences, for somebody who decides "
    "whether to start it. Mention only ingredients that are listed."
)


def prompt(title: str, ingredients: str, domain: str = "") -> str | None:
    """None when there is nothing to describe."""
    if is_blank(title):
        return None
    return alpaca(
        INSTRUCTION,
        labelled(("Title", title), ("Domain", domain.lower()), ("Ingredients", ingredients)),
    )


def parse(text: str) -> str | None:
    return speakable(text, sentences=SENTENCES, characters=CHARACTERS) or None


class LLMDescriptionGeneration(llm_pb2_grpc.LLMDescriptionGenerationServicer):
    def __init__(self, front: Front) -> None:
        self._front = front

    async def generate_description(
        self, request: llm_pb2.LLMDescriptionGenerationRequest, context: Context
    ) -> llm_pb2.DescriptionGenerationResponse:

        def ask(place: int) -> Question[str]:
            return Question(prompt(request.task_title, request.ingredients), parse)

        return llm_pb2.DescriptionGenerationResponse(description=(await self._descriptions(context, 1, ask))[0])

    async def generate_descriptions(
        self, request: llm_pb2.LLMMultipleDescriptionGenerationRequest, context: Context
    ) -> llm_pb2.MultipleDescriptionGenerationResponse:
        titles, ingredients, domains = request.task_title, request.ingredients, request.domains

        def ask(place: int) -> Question[str]:
            return Question(prompt(titles[place], at(ingredients, place), at(domains, place)), parse)

        return llm_pb2.MultipleDescriptionGenerationResponse(
            description=await self._descriptions(context, len(titles), ask)
        )

    async def _descriptions(self, context: Context, count: int, ask: Callable[[int], Question[str]]) -> list[str]:
        deadline = self._front.deadline(context)
        answers = await self._front.answers(context, count, ask, self._front.generation(MAX_TOKENS), deadline)
        return [answer.value or "" for answer in answers]
