"""`LLMReplacementGeneration`: replaces an ingredient by another one, and rewrites the steps for it."""

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

# More tokens than the longest object that the schema allows, so that no object is cut.
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
    """Returns the prompt; None if the request does not say what to replace."""
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
    """Returns the ingredient of an answer; None if the answer names none or names the original one."""
    found = first_object(text)
    if found is None:
        return None
    name = words(found.get("name"), LONGEST_NAME)
    if not name or name.casefold() == original.strip().casefold():
        return None
    return llm_pb2.Ingredient(name=name, amount=words(found.get("amount"), LONGEST_AMOUNT))


def generate_replacement(request: llm_pb2.IngredientReplacementRequest) -> Workflow[llm_pb2.Ingredient]:
    """Returns a workflow that finds a new ingredient. Its response is without one if the model gives none."""
    parse = partial(parse_replacement, original=request.original_ingredient.name)
    return Workflow(
        lambda _: Question(replacement_prompt(request), parse),
        lambda answers: llm_pb2.IngredientReplacementResponse(new_ingredient=answers[0].value),
        OBJECT_TOKENS,
        grammar=REPLACEMENT,
    )


def rewrite_steps(request: llm_pb2.AdjustedStepGenerationRequest) -> Workflow[str]:
    """Returns a workflow that rewrites each step for the replaced ingredients.

    Its response has the texts in the order of the steps. A step without a replaced ingredient is unchanged. A step that
    the model cannot rewrite is empty.
    """
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
    """Returns a workflow that puts the replaced ingredients into the steps and requirements of the session's task.

    Its response is the session. The session is unchanged unless its task is being validated. The text of a step that
    the model cannot rewrite is unchanged, too.
    """
    work = SessionRewriting(session)

    def respond(answers: Sequence[Answer[str]]) -> llm_pb2.Session:
        work.put([answer.value for answer in answers])
        return session

    return Workflow(work.ask, respond, STEP_TOKENS, count=work.parts)
