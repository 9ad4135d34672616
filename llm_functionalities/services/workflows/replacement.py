"""`LLMReplacementGeneration`: another ingredient in the place of one, and the steps rewritten for it."""

from functools import partial

from llm_functionalities.endpoint.generation import Grammar
from llm_functionalities.model.model import Question
from llm_functionalities.services.context import CallContext, ModelClient
from llm_functionalities.services.prompts import alpaca, is_blank, labelled
from llm_functionalities.services.workflows.answers import first_object, words
from llm_functionalities.services.workflows.rewriting import Replacement, SessionRewriting, rewriting
from shared.stubs import llm_pb2, llm_pb2_grpc

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
    return alpaca(
        REPLACE,
        labelled(
            ("Task", request.task_title),
            ("Ingredient", original.name),
            ("Amount", original.amount),
            ("User", request.user_question),
            ("Assistant", request.agent_response),
        ),
    )


def parse_replacement(text: str, original: str = "") -> llm_pb2.Ingredient | None:
    """Returns the ingredient of an answer; None when it names none, or the original one again."""
    found = first_object(text)
    if found is None:
        return None
    name = words(found.get("name"), LONGEST_NAME)
    if not name or name.casefold() == original.strip().casefold():
        return None
    return llm_pb2.Ingredient(name=name, amount=words(found.get("amount"), LONGEST_AMOUNT))


class LLMReplacementGeneration(llm_pb2_grpc.LLMReplacementGenerationServicer):
    def __init__(self, model: ModelClient) -> None:
        self._model = model

    async def generate_replacement(
        self, request: llm_pb2.IngredientReplacementRequest, context: CallContext
    ) -> llm_pb2.IngredientReplacementResponse:
        """Returns a response without an ingredient when the model has none."""
        deadline = self._model.deadline(context)
        original = request.original_ingredient.name
        generation = self._model.generation(OBJECT_TOKENS, REPLACEMENT, grammar_is_optional=True)

        def ask() -> Question[llm_pb2.Ingredient]:
            return Question(replacement_prompt(request), partial(parse_replacement, original=original))

        answer = await self._model.answer(context, ask, generation, deadline)
        return llm_pb2.IngredientReplacementResponse(new_ingredient=answer.value)

    async def rewrite_steps(
        self, request: llm_pb2.AdjustedStepGenerationRequest, context: CallContext
    ) -> llm_pb2.AdjustedStepGenerationResponse:
        """Returns a text for each step, in their order: unchanged without a replaced ingredient, empty on failure."""
        deadline = self._model.deadline(context)
        steps = request.step
        replacements = [Replacement(pair) for pair in request.ingredient]

        def ask(place: int) -> Question[str]:
            return rewriting(request.task_title, steps[place].response.speech_text, replacements)

        answers = await self._model.answers(context, len(steps), ask, self._model.generation(STEP_TOKENS), deadline)
        rewritten = [
            step.response.speech_text if answer.nothing_asked else answer.value or ""
            for step, answer in zip(steps, answers, strict=True)
        ]
        ids = [step.unique_id for step in steps]
        return llm_pb2.AdjustedStepGenerationResponse(step_text=rewritten, ids=ids)

    async def adjust_step_texts(self, request: llm_pb2.Session, context: CallContext) -> llm_pb2.Session:
        """Returns the session with the ingredients that its task has replaced put into its steps and requirements.

        It is as it was where no task is being validated, and so is the text of a step that the model cannot rewrite.
        """
        deadline = self._model.deadline(context)
        work = SessionRewriting(request)
        answers = await self._model.answers(
            context, work.parts, work.ask, self._model.generation(STEP_TOKENS), deadline
        )
        work.put([answer.value for answer in answers])
        return request
