"""`LLMReplacementGeneration`: another ingredient in the place of one, and the steps rewritten for it."""

import re
from collections.abc import Sequence
from functools import partial

from llm_functionalities.endpoint.generation import Grammar
from llm_functionalities.model.model import Question
from llm_functionalities.services.context import CallContext, ModelClient
from llm_functionalities.services.prompts import LONGEST_VALUE, alpaca, is_blank, labelled
from llm_functionalities.services.workflows.answers import first_object, speakable, words
from shared.stubs import llm_pb2, llm_pb2_grpc

LONGEST_NAME = 60
LONGEST_AMOUNT = 40

# Characters of an ingredient's name that are looked for in a step.
LONGEST_INGREDIENT = 200

# More than the longest object that the schema allows, so that none is cut.
OBJECT_TOKENS = 160

STEP_TOKENS = 256
STEP_SENTENCES = 8
STEP_CHARACTERS = 1000

REPLACE = (
    "Find a replacement for the ingredient and answer in JSON, with the keys name and amount. Where the assistant has "
    "already proposed one, take that. Give the amount that stands for the original amount."
)
REWRITE = "Rewrite the step with the new ingredients. Change nothing else."

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

_WORD = re.compile(r"\w+")

Replaced = Sequence[llm_pb2.ReplacedIngredient]


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


def step_prompt(title: str, step: str, replaced: Replaced) -> str:
    changes = [
        (label, f"{ingredient.name} ({ingredient.amount})" if ingredient.amount else ingredient.name)
        for pair in replaced
        for label, ingredient in (("Original", pair.original), ("Replacement", pair.replacement))
    ]
    return alpaca(REWRITE, labelled(("Task", title), ("Step", step), *changes))


class Words:
    """The words of a text, among which the words of another text can be found quickly.

    Letter case, and the characters between the words, do not count.
    """

    def __init__(self, text: str, longest: int = LONGEST_VALUE) -> None:
        # Two spaces between the words, so that each has one of its own on either side.
        self._line = f" {'  '.join(_WORD.findall(text[:longest].casefold()))} "
        self._forms = [f" {self._line.strip()}{plural} " for plural in ("", "s", "es")] if self._line.strip() else []

    def mention(self, name: "Words") -> bool:
        """Returns True if `name`, in the singular or the plural, is among the words."""
        return any(form in self._line for form in name._forms)

    def mention_beside(self, name: "Words", other: "Words") -> bool:
        """Returns True if `name` is among the words other than as a part of `other`."""
        if not self.mention(name):
            return False
        line = self._line
        for form in other._forms:
            line = line.replace(form, "")
        return any(form in line for form in name._forms)


def parse_step(text: str, replaced: Replaced) -> str | None:
    """Returns the rewritten step; None when it still mentions an ingredient that was to go."""
    step = speakable(text, sentences=STEP_SENTENCES, characters=STEP_CHARACTERS)
    words = Words(step)
    gone = all(not words.mention_beside(_name(pair.original), _name(pair.replacement)) for pair in replaced)
    return step if step and gone else None


def rewriting(title: str, text: str, ingredients: Sequence[tuple[Words, llm_pb2.ReplacedIngredient]]) -> Question[str]:
    """Returns the question for a step; there is nothing to ask when it mentions none of the ingredients.

    ingredients: those that are replaced, each with the name of the original one.
    """
    words = Words(text)
    replaced = [pair for name, pair in ingredients if words.mention(name)]
    prompt = step_prompt(title, text, replaced) if replaced else None
    return Question(prompt, partial(parse_step, replaced=replaced))


def _name(ingredient: llm_pb2.Ingredient) -> Words:
    return Words(ingredient.name, LONGEST_INGREDIENT)


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

        new = await self._model.answer(context, ask, generation, deadline)
        return llm_pb2.IngredientReplacementResponse(new_ingredient=new)

    async def rewrite_steps(
        self, request: llm_pb2.AdjustedStepGenerationRequest, context: CallContext
    ) -> llm_pb2.AdjustedStepGenerationResponse:
        """Returns a text for each step, in their order: unchanged without a replaced ingredient, empty on failure."""
        deadline = self._model.deadline(context)
        steps = request.step
        ingredients = [(_name(pair.original), pair) for pair in request.ingredient]

        def ask(place: int) -> Question[str]:
            return rewriting(request.task_title, steps[place].response.speech_text, ingredients)

        answers = await self._model.answers(context, len(steps), ask, self._model.generation(STEP_TOKENS), deadline)
        rewritten = [
            step.response.speech_text if answer.nothing_asked else answer.value or ""
            for step, answer in zip(steps, answers, strict=True)
        ]
        ids = [step.unique_id for step in steps]
        return llm_pb2.AdjustedStepGenerationResponse(step_text=rewritten, ids=ids)
