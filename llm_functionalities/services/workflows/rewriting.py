"""Steps rewritten for replaced ingredients: one by one, or in the task of an assistant's session."""

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
    """The words of a text, among which the words of another text can be found quickly.

    Letter case, and the characters between the words, do not count.
    """

    def __init__(self, text: str, longest: int = LONGEST_VALUE) -> None:
        # Two spaces between the words, so that each has one of its own on either side.
        self._line = f" {'  '.join(_WORD.findall(text[:longest].casefold()))} "
        self._forms = [f" {self._line.strip()}{plural} " for plural in ("", "s", "es")] if self._line.strip() else []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words) and self._line == other._line

    def __hash__(self) -> int:
        return hash(self._line)

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


class Replacement:
    """An ingredient in the place of another, which texts mention by its name or, if it has one, by a short name."""

    def __init__(self, pair: llm_pb2.ReplacedIngredient, short_name: str = "") -> None:
        self.original, self.new = pair.original, pair.replacement
        self._names = [Words(name, LONGEST_INGREDIENT) for name in (pair.original.name, short_name)]
        self._new_name = Words(pair.replacement.name, LONGEST_INGREDIENT)

    def is_named(self, words: Words) -> bool:
        """Returns True if the original ingredient's name is all that the words are."""
        return words in self._names

    def is_due_in(self, words: Words) -> bool:
        """Returns True if the words mention the original ingredient."""
        return any(words.mention_beside(name, self._new_name) for name in self._names)


def rewriting(title: str, step: str, replacements: Sequence[Replacement]) -> Question[str]:
    """Returns the question for a step's text; there is nothing to ask when it mentions none of the ingredients."""
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
    """Returns the rewritten step; None when it still mentions an ingredient that was to go."""
    step = speakable(text, sentences=STEP_SENTENCES, characters=STEP_CHARACTERS)
    words = Words(step)
    return step if step and not any(each.is_due_in(words) for each in replaced) else None


def short_name(name: str, question: str) -> str:
    """Returns the end of an ingredient's name that a question mentions, "flour" of "all-purpose flour"; "" for none."""
    asked = Words(question)
    words = _WORD.findall(re.split("[,(]", name[:LONGEST_INGREDIENT])[0])
    ends = [" ".join(words[-count:]) for count in range(min(len(words), LONGEST_SHORT_NAME), 0, -1)]
    return next((end for end in ends if not end.startswith("of ") and asked.mention(Words(end))), "")


class SessionRewriting:
    """The replaced ingredients of a session, put into its task: into each of its steps, then into its requirements.

    The parts are worked on by worker threads, in any order. What needs no model is changed when a part is requested.
    """

    def __init__(self, session: llm_pb2.Session) -> None:
        self._session = session
        self._taskmap = session.task.taskmap
        is_due = session.task.phase == llm_pb2.Task.VALIDATING and self._taskmap.replaced_ingredients
        self.parts = len(self._taskmap.steps) + 1 if is_due else 0

    def ask(self, part: int) -> Question[str]:
        """Returns what to ask the model for a part: the texts of the steps, in their order, then nothing."""
        if part == len(self._taskmap.steps):
            self._replace_requirements()
            return Question.verbatim(None)
        response = self._taskmap.steps[part].response
        if response.HasField("screen"):
            self._replace_on_screen(response)
        return rewriting(self._taskmap.title, response.speech_text, self._replacements)

    def put(self, texts: Sequence[str | None]) -> None:
        """Puts the rewritten texts into their steps. texts: one for each part; None: it stays as it is."""
        for step, text in zip(self._taskmap.steps, texts, strict=False):
            if text is not None:
                step.response.speech_text = text
                if step.response.screen.paragraphs:
                    step.response.screen.paragraphs[0] = text

    @cached_property
    def _replacements(self) -> list[Replacement]:
        # The last turn is the user's consent; the one before it, the question that led to the replacement.
        turns = self._session.turn
        question = turns[-2].user_request.interaction.text if len(turns) > 1 else ""
        return [
            Replacement(pair, short_name(pair.original.name, question))
            for pair in self._taskmap.replaced_ingredients
            if pair.original.name.strip() and pair.replacement.name.strip()
        ]

    def _replace_on_screen(self, response: llm_pb2.OutputInteraction) -> None:
        """Replaces a step's own requirements, and adds requirements for ingredients that only its text mentions."""
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
        """Replaces requirements that are named like an original ingredient; otherwise requirements that mention one."""
        requirements = self._taskmap.requirement_list
        words = [Words(requirement.name) for requirement in requirements]
        for replacement in self._replacements:
            named = [place for place, each in enumerate(words) if replacement.is_named(each)]
            for place in named or [place for place, each in enumerate(words) if replacement.is_due_in(each)]:
                requirements[place].name = replacement.new.name.lower()
                requirements[place].amount = replacement.new.amount or requirements[place].amount
