"""`LLMDescriptionGeneration`: a task introduced by its title and what it needs."""

from llm_functionalities.caller import Context, Front
from llm_functionalities.prompts import alpaca
from llm_functionalities.workflows.fields import at, labelled
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
    if not title.strip():
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
        asked = [prompt(request.task_title, request.ingredients)]
        return llm_pb2.DescriptionGenerationResponse(description=(await self._descriptions(context, asked))[0])

    async def generate_descriptions(
        self, request: llm_pb2.LLMMultipleDescriptionGenerationRequest, context: Context
    ) -> llm_pb2.MultipleDescriptionGenerationResponse:
        ingredients, domains = list(request.ingredients), list(request.domains)
        asked = [prompt(title, at(ingredients, i), at(domains, i)) for i, title in enumerate(request.task_title)]
        return llm_pb2.MultipleDescriptionGenerationResponse(description=await self._descriptions(context, asked))

    async def _descriptions(self, context: Context, prompts: list[str | None]) -> list[str]:
        deadline = self._front.deadline(context)
        generation = self._front.generation(MAX_TOKENS)
        texts = await self._front.all_parsed(context, prompts, generation, deadline, parse)
        return [text or "" for text in texts]
