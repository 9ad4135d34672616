"""`LLMReplacementGeneration`: another ingredient in the place of one, and the steps rewritten for it."""

from collections.abc import Sequence
from functools import partial

from llm_functionalities.endpoint.generation import Grammar
from llm_functionalities.model.model import Answer, Question
from llm_functionalities.services.prompts import alpaca, is_blank, labelled, with_images
from llm_functionalities.services.workflows.answers import first_object, words
from llm_functionalities.services.workflows.rewriting import Replacement, SessionRewriting, rewriting
from llm_functionalities.services.workflows.workflow import Workflow
from shared.stubs import llm_pb2

LONGEST_NAME = 60
LONGEST_AMOUNT = 40

# More than the longest object that the schema allows, so that none is cut.
OBJECT_TOKENS = 160

STEP_TOKENS = 256

REPLACE = (
    "Find a replacement for the ingredient and answer in JSON, with the keys name and amount. Where the assistant has "
    "already proposed one, take that. Give the amount that stands for the original amount."
)

REPLACEMENT = Grammar(
    json_schema={
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME},
            "amount": {"type": "string", "maxLength": LONGEST_AMOUNT},
        },
        "required": ["name", "amount"],
        "additionalProperties": False,
    }
)


def replacement_prompt(request: llm_pb2.IngredientReplacementRequest) -> str | None:
    """Returns None when there is nothing that says what to replace."""
    original = request.original_ingredient
    if is_blank(original.name) and is_blank(request.user_question) and is_blank(request.agent_response):
        return None
    text = alpaca(
        REPLACE,
        labelled(
            ("Task", request.task_title),
            ("Ingredient", original.name),
            ("Amount", original.amount),
            ("User", request.user_question),
            ("Assistant", request.agent_response),
        ),
    )
    return with_images(request.images, text)


def parse_replacement(text: str, original: str = "") -> llm_pb2.Ingredient | None:
    """Returns the ingredient of an answer; None when it names none, or the original one again."""
    found = first_object(text)
    if found is None:
        return None
    name = words(found.get("name"), LONGEST_NAME)
    if not name or name.casefold() == original.strip().casefold():
        return None
    return llm_pb2.Ingredient(name=name, amount=words(found.get("amount"), LONGEST_AMOUNT))


def generate_replacement(request: llm_pb2.IngredientReplacementRequest) -> Workflow[llm_pb2.Ingredient]:
    """The response is without an ingredient when the model has none."""
    parse = partial(parse_replacement, original=request.original_ingredient.name)
    return Workflow(
        lambda _: Question(replacement_prompt(request), parse),
        lambda answers: llm_pb2.IngredientReplacementResponse(new_ingredient=answers[0].value),
        OBJECT_TOKENS,
        grammar=REPLACEMENT,
    )


def rewrite_steps(request: llm_pb2.AdjustedStepGenerationRequest) -> Workflow[str]:
    """The response has a text for each step, in their order: unchanged without a replaced ingredient, or empty."""
    steps = [step.response.speech_text for step in request.step]
    replacements = [Replacement(pair) for pair in request.ingredient]

    def respond(answers: Sequence[Answer[str]]) -> llm_pb2.AdjustedStepGenerationResponse:
        rewritten = [
            step if answer.nothing_asked else answer.value or "" for step, answer in zip(steps, answers, strict=True)
        ]
        return llm_pb2.AdjustedStepGenerationResponse(
            step_text=rewritten, ids=[step.unique_id for step in request.step]
        )

    return Workflow(
        lambda place: rewriting(request.task_title, steps[place], replacements),
        respond,
        STEP_TOKENS,
        count=len(steps),
    )


def adjust_step_texts(session: llm_pb2.Session) -> Workflow[str]:
    """The response is the session with the ingredients that its task has replaced put into its steps and requirements.

    It is as it was where no task is being validated, and so is the text of a step that the model cannot rewrite.
    """
    work = SessionRewriting(session)

    def respond(answers: Sequence[Answer[str]]) -> llm_pb2.Session:
        work.put([answer.value for answer in answers])
        return session

    return Workflow(work.ask, respond, STEP_TOKENS, count=work.parts)
