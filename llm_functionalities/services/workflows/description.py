"""`LLMDescriptionGeneration`: a task introduced by its title and what it needs."""

from collections.abc import Callable

from llm_functionalities.model.model import Question
from llm_functionalities.services.context import CallContext, ModelClient
from llm_functionalities.services.prompts import alpaca, is_blank, labelled, value_at
from llm_functionalities.services.workflows.answers import speech_parser
from shared.stubs import llm_pb2, llm_pb2_grpc

MAX_TOKENS = 128
SENTENCES = 2
CHARACTERS = 400

INSTRUCTION = (
    "Write an appealing description of this recipe or project in one or two sentences, for somebody who decides "
    "whether to start it. Mention only ingredients that are listed."
)

parse = speech_parser(sentences=SENTENCES, characters=CHARACTERS)


def prompt(title: str, ingredients: str, domain: str = "") -> str | None:
    """Returns None when there is nothing to describe."""
    if is_blank(title):
        return None
    return alpaca(
        INSTRUCTION,
        labelled(("Title", title), ("Domain", domain.lower()), ("Ingredients", ingredients)),
    )


class LLMDescriptionGeneration(llm_pb2_grpc.LLMDescriptionGenerationServicer):
    def __init__(self, model: ModelClient) -> None:
        self._model = model

    async def generate_description(
        self, request: llm_pb2.LLMDescriptionGenerationRequest, context: CallContext
    ) -> llm_pb2.DescriptionGenerationResponse:

        def ask(place: int) -> Question[str]:
            return Question(prompt(request.task_title, request.ingredients), parse)

        return llm_pb2.DescriptionGenerationResponse(description=(await self._descriptions(context, 1, ask))[0])

    async def generate_descriptions(
        self, request: llm_pb2.LLMMultipleDescriptionGenerationRequest, context: CallContext
    ) -> llm_pb2.MultipleDescriptionGenerationResponse:
        titles, ingredients, domains = request.task_title, request.ingredients, request.domains

        def ask(place: int) -> Question[str]:
            return Question(prompt(titles[place], value_at(ingredients, place), value_at(domains, place)), parse)

        return llm_pb2.MultipleDescriptionGenerationResponse(
            description=await self._descriptions(context, len(titles), ask)
        )

    async def _descriptions(self, context: CallContext, count: int, ask: Callable[[int], Question[str]]) -> list[str]:
        deadline = self._model.deadline(context)
        answers = await self._model.answers(context, count, ask, self._model.generation(MAX_TOKENS), deadline)
        return [answer.value or "" for answer in answers]
