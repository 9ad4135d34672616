"""Rewrites steps for replaced ingredients: one by one, or in the task of an assistant's session."""

import re
from collections.abc import Sequence
from functools import cached_property, partial

from llm_functionalities.model.model import Question
from llm_functionalities.services.prompts import LONGEST_VALUE, alpaca, labelled
from llm_functionalities.services.workflows.answers import speakable
from shared.stubs import llm_pb2

# Characters of an ingredient's name that are looked for in a step, and words of it that a short name may have.
LONGEST_INGREDIENT = 200
LONGEST_SHORT_NAME = 4

STEP_SENTENCES = 8
STEP_CHARACTERS = 1000

REWRITE = "Rewrite the step with the new ingredients. Change nothing else."

_WORD = re.compile(r"\w+")


class Words:
    """The words of a text, for finding the words of another text in them.

    Case and the characters between the words are ignored.
    """

    def __init__(self, text: str, longest: int = LONGEST_VALUE) -> None:
        # Words are two spaces apart, so that each word has a space of its own before and after it.
        self._line = f" {'  '.join(_WORD.findall(text[:longest].casefold()))} "
        self._forms = [f" {self._line.strip()}{plural} " for plural in ("", "s", "es")] if self._line.strip() else []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words) and self._line == other._line

    def __hash__(self) -> int:
        return hash(self._line)

    def mention(self, name: "Words") -> bool:
        """Returns True if the words contain `name`, in the singular or the plural."""
        return any(form in self._line for form in name._forms)

    def mention_beside(self, name: "Words", other: "Words") -> bool:
        """Returns True if the words contain `name` outside of `other`."""
        if not self.mention(name):
            return False
        line = self._line
        for form in other._forms:
            line = line.replace(form, "")
        return any(form in line for form in name._forms)


class Replacement:
    """A replaced ingredient. Texts mention the original by its name or, if given, by its short name."""

    def __init__(self, pair: llm_pb2.ReplacedIngredient, short_name: str = "") -> None:
        self.original, self.new = pair.original, pair.replacement
        self._names = [Words(name, LONGEST_INGREDIENT) for name in (pair.original.name, short_name)]
        self._new_name = Words(pair.replacement.name, LONGEST_INGREDIENT)

    def is_named(self, words: Words) -> bool:
        """Returns True if the words are the name of the original ingredient, and nothing else."""
        return words in self._names

    def is_due_in(self, words: Words) -> bool:
        """Returns True if the words mention the original ingredient other than in the name of the new one."""
        return any(words.mention_beside(name, self._new_name) for name in self._names)


def rewriting(title: str, step: str, replacements: Sequence[Replacement]) -> Question[str]:
    """Returns the question that rewrites a step. Its prompt is None if the step mentions none of the ingredients."""
    words = Words(step)
    due = [replacement for replacement in replacements if replacement.is_due_in(words)]
    return Question(step_prompt(title, step, due) if due else None, partial(parse_step, replaced=due))


def step_prompt(title: str, step: str, replaced: Sequence[Replacement]) -> str:
    changes = [
        (label, f"{ingredient.name} ({ingredient.amount})" if ingredient.amount else ingredient.name)
        for each in replaced
        for label, ingredient in (("Original", each.original), ("Replacement", each.new))
    ]
    return alpaca(REWRITE, labelled(("Task", title), ("Step", step), *changes))


def parse_step(text: str, replaced: Sequence[Replacement]) -> str | None:
    """Returns the rewritten step; None if it is empty or still mentions a replaced ingredient."""
    step = speakable(text, sentences=STEP_SENTENCES, characters=STEP_CHARACTERS)
    words = Words(step)
    return step if step and not any(each.is_due_in(words) for each in replaced) else None


def short_name(name: str, question: str) -> str:
    """Returns the longest end of an ingredient's name that `question` mentions; "" if it mentions none.

    An example is "flour" for "all-purpose flour".
    """
    asked = Words(question)
    words = _WORD.findall(re.split("[,(]", name[:LONGEST_INGREDIENT])[0])
    ends = [" ".join(words[-count:]) for count in range(min(len(words), LONGEST_SHORT_NAME), 0, -1)]
    return next((end for end in ends if not end.startswith("of ") and asked.mention(Words(end))), "")


class SessionRewriting:
    """Puts the replaced ingredients of a session into its task.

    Each step is a part of the work, and the list of requirements is the last part. Worker threads may do the parts in
    any order. Changes that need no model are made when the question of a part is made.
    """

    def __init__(self, session: llm_pb2.Session) -> None:
        self._session = session
        self._taskmap = session.task.taskmap
        is_due = session.task.phase == llm_pb2.Task.VALIDATING and self._taskmap.replaced_ingredients
        self.parts = len(self._taskmap.steps) + 1 if is_due else 0

    def ask(self, part: int) -> Question[str]:
        """Changes a part as far as it needs no model, and returns the question that rewrites the step's text.

        The last part, the requirements, has nothing to ask.
        """
        if part == len(self._taskmap.steps):
            self._replace_requirements()
            return Question.verbatim(None)
        response = self._taskmap.steps[part].response
        if response.HasField("screen"):
            self._replace_on_screen(response)
        return rewriting(self._taskmap.title, response.speech_text, self._replacements)

    def put(self, texts: Sequence[str | None]) -> None:
        """Stores the rewritten texts in their steps. texts: a text for each part; None: the step is unchanged."""
        for step, text in zip(self._taskmap.steps, texts, strict=False):
            if text is not None:
                step.response.speech_text = text
                if step.response.screen.paragraphs:
                    step.response.screen.paragraphs[0] = text

    @cached_property
    def _replacements(self) -> list[Replacement]:
        # The last turn is the user's consent. The turn before it is the question that led to the replacement.
        turns = self._session.turn
        question = turns[-2].user_request.interaction.text if len(turns) > 1 else ""
        return [
            Replacement(pair, short_name(pair.original.name, question))
            for pair in self._taskmap.replaced_ingredients
            if pair.original.name.strip() and pair.replacement.name.strip()
        ]

    def _replace_on_screen(self, response: llm_pb2.OutputInteraction) -> None:
        """Replaces ingredients in a step's own requirements, and adds those that only its text mentions."""
        text, requirements = Words(response.speech_text), response.screen.requirements
        words = [Words(requirement) for requirement in requirements]
        for replacement in self._replacements:
            new = f"{replacement.new.amount} {replacement.new.name}".strip().lower()
            places = [place for place, each in enumerate(words) if replacement.is_due_in(each)]
            for place in places:
                requirements[place] = new
            if not places and replacement.is_due_in(text) and new not in requirements:
                requirements.append(new)

    def _replace_requirements(self) -> None:
        """Replaces requirements named like an original ingredient, or if there is none, those that mention it."""
        requirements = self._taskmap.requirement_list
        words = [Words(requirement.name) for requirement in requirements]
        for replacement in self._replacements:
            named = [place for place, each in enumerate(words) if replacement.is_named(each)]
            for place in named or [place for place, each in enumerate(words) if replacement.is_due_in(each)]:
                requirements[place].name = replacement.new.name.lower()
                requirements[place].amount = replacement.new.amount or requirements[place].amount
