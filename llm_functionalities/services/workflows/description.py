"""`LLMDescriptionGeneration`: introduces a task by its title and its requirements."""

from llm_functionalities.model.model import Question
from llm_functionalities.services.prompts import alpaca, is_blank, labelled, value_at
from llm_functionalities.services.workflows.answers import speech_parser
from llm_functionalities.services.workflows.workflow import Workflow, texts
from shared.stubs import llm_pb2

MAX_TOKENS = 128
SENTENCES = 2
CHARACTERS = 400

INSTRUCTION = (
    "Write an appealing description of this recipe or project in one or two sentences, for somebody who decides "
    "whether to start it. Mention only ingredients that are listed."
)

parse = speech_parser(sentences=SENTENCES, characters=CHARACTERS)


def prompt(title: str, ingredients: str, domain: str = "") -> str | None:
    """Returns the prompt; None if there is nothing to describe."""
    if is_blank(title):
        return None
    return alpaca(
        INSTRUCTION,
        labelled(("Title", title), ("Domain", domain.lower()), ("Ingredients", ingredients)),
    )


def generate_description(request: llm_pb2.LLMDescriptionGenerationRequest) -> Workflow[str]:
    return Workflow(
        lambda _: Question(prompt(request.task_title, request.ingredients), parse),
        lambda answers: llm_pb2.DescriptionGenerationResponse(description=answers[0].value or ""),
        MAX_TOKENS,
    )


def generate_descriptions(request: llm_pb2.LLMMultipleDescriptionGenerationRequest) -> Workflow[str]:
    titles, ingredients, domains = request.task_title, request.ingredients, request.domains
    return Workflow(
        lambda place: Question(prompt(titles[place], value_at(ingredients, place), value_at(domains, place)), parse),
        lambda answers: llm_pb2.MultipleDescriptionGenerationResponse(description=texts(answers)),
        MAX_TOKENS,
        count=len(titles),
    )
