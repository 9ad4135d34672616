"""`LLMReplacementGeneration`: another ingredient in the place of one, and the steps rewritten for it."""

import re
from collections.abc import Sequence
from functools import partial

from llm_functionalities.caller import Context, Front
from llm_functionalities.generation import Grammar
from llm_functionalities.prompts import alpaca
from llm_functionalities.workflows.fields import labelled
from llm_functionalities.workflows.objects import first_object, words
from llm_functionalities.workflows.sentences import speakable
from shared.stubs import llm_pb2, llm_pb2_grpc

LONGEST_NAME = 60
LONGEST_AMOUNT = 40
OBJECT_TOKENS = 160
"""More than the longest object that the schema allows, so that none is cut."""
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

Replaced = Sequence[llm_pb2.ReplacedIngredient]


def replacement_prompt(request: llm_pb2.IngredientReplacementRequest) -> str:
    original = request.original_ingredient
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
    """The ingredient of an answer; None when it names none, or the original one again."""
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


def parse_step(text: str, replaced: Replaced) -> str | None:
    """The rewritten step; None when it still mentions an ingredient that was to go."""
    step = speakable(text, sentences=STEP_SENTENCES, characters=STEP_CHARACTERS)
    if not step or any(_still_mentions(step, pair) for pair in replaced):
        return None
    return step


def mentions(text: str, ingredient: str) -> bool:
    """Whether `text` speaks of the ingredient, in the singular or the plural."""
    name = ingredient.strip()
    if not name:
        return False
    return re.search(rf"\b{re.escape(name)}(?:s|es)?\b", text, re.IGNORECASE) is not None


def _still_mentions(step: str, pair: llm_pb2.ReplacedIngredient) -> bool:
    new = pair.replacement.name.strip()
    without_new = re.sub(re.escape(new), "", step, flags=re.IGNORECASE) if new else step
    return mentions(without_new, pair.original.name)


class LLMReplacementGeneration(llm_pb2_grpc.LLMReplacementGenerationServicer):
    def __init__(self, front: Front) -> None:
        self._front = front

    async def generate_replacement(
        self, request: llm_pb2.IngredientReplacementRequest, context: Context
    ) -> llm_pb2.IngredientReplacementResponse:
        """No ingredient in the response: there is none."""
        deadline = self._front.deadline(context)
        original = request.original_ingredient.name
        if not (original.strip() or request.user_question.strip() or request.agent_response.strip()):
            return llm_pb2.IngredientReplacementResponse()
        generation = self._front.generation(OBJECT_TOKENS, REPLACEMENT, wish=True)
        parse = partial(parse_replacement, original=original)
        new = await self._front.parsed(context, replacement_prompt(request), generation, deadline, parse)
        return llm_pb2.IngredientReplacementResponse(new_ingredient=new)

    async def rewrite_steps(
        self, request: llm_pb2.AdjustedStepGenerationRequest, context: Context
    ) -> llm_pb2.AdjustedStepGenerationResponse:
        """A text for each step, in their order: as it was when no replaced ingredient is in it, empty on failure."""
        deadline = self._front.deadline(context)
        texts = [step.response.speech_text for step in request.step]
        changed = [[pair for pair in request.ingredient if mentions(text, pair.original.name)] for text in texts]
        asked = [
            step_prompt(request.task_title, text, pairs) if pairs else None
            for text, pairs in zip(texts, changed, strict=True)
        ]
        generation = self._front.generation(STEP_TOKENS)
        answers = await self._front.answers(context, asked, generation, deadline)
        rewritten = [
            self._front.understood(context, answer, partial(parse_step, replaced=pairs)) or "" if pairs else text
            for answer, text, pairs in zip(answers, texts, changed, strict=True)
        ]
        ids = [step.unique_id for step in request.step]
        return llm_pb2.AdjustedStepGenerationResponse(step_text=rewritten, ids=ids)
