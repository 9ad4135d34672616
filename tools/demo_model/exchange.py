"""What the corpus is made of: one request with its answer, and the wording that varies from one to the next."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SINGULAR_ENDINGS = ("ss", "us")
_UNCOUNTED = frozenset({"sandpaper", "masking tape"})
_CONSONANT_SOUND = ("uti", "uni", "one")
_SINGULAR_FORMS = {
    "be": "is",
    "do": "does",
    "it": "it",
    "them": "it",
    "takes": "takes",
    "goes": "goes",
    "keeps": "keeps",
    "works": "works",
    "needs": "needs",
    "much": "much",
    "was": "was",
}
_PLURAL_FORMS = {
    "be": "are",
    "do": "do",
    "it": "they",
    "them": "them",
    "takes": "take",
    "goes": "go",
    "keeps": "keep",
    "works": "work",
    "needs": "need",
    "much": "many",
    "was": "were",
}


@dataclass(frozen=True)
class Exchange:
    """One request and its answer. `context` is what the request is about: Alpaca's input, a recipe, a step."""

    request: str
    answer: str
    context: str = ""


@dataclass(frozen=True)
class Source:
    """A way to make exchanges.

    `weight` is how often it is drawn, relative to the others. `closed` marks a source of a few dozen requests
    that a user is sure to make word for word, such as greetings: all of its requests are trained on, so none of
    them can be held out.
    """

    make: Callable[[Random], Exchange]
    weight: float = 1.0
    closed: bool = False


def vary(rng: Random, *templates: str, **values: object) -> str:
    """Fills one of the templates and capitalises its start.

    In a template, `[a|b]` is one of the alternatives (they nest) and `{name}` a value.
    """
    template = rng.choice(templates)
    while match := _CHOICE.search(template):
        template = template[: match.start()] + rng.choice(match[1].split("|")) + template[match.end() :]
    return capital(template.format(**values))


def capital(text: str) -> str:
    """The text with its first letter in upper case, the rest as it was."""
    return text[:1].upper() + text[1:]


def listing(names: Sequence[str], word: str = "and") -> str:
    """`a, b and c`."""
    return f"{', '.join(names[:-1])} {word} {names[-1]}" if len(names) > 1 else names[0]


def numbered(steps: Sequence[str]) -> str:
    """One step a line, each after its number."""
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, start=1))


def plural(name: str) -> bool:
    """Whether an English name of a thing takes `are`."""
    return name.endswith("s") and not name.endswith(_SINGULAR_ENDINGS) and not name.startswith("pair of ")


def agreement(name: str) -> dict[str, str]:
    """The words that agree with a name of a thing, as values for `vary`: `{be}`, `{do}`, `{it}`, `{takes}`..."""
    forms = _PLURAL_FORMS if plural(name) else _SINGULAR_FORMS
    return {**forms, "It": capital(forms["it"])}


def article(name: str) -> str:
    """The name with `a` or `an`, or as it is when it takes none."""
    if plural(name) or name in _UNCOUNTED or name.startswith("a "):
        return name
    vowel = name[0].lower() in "aeiou" and not name.startswith(_CONSONANT_SOUND)
    return f"{'an' if vowel else 'a'} {name}"


def measured(amount: str, name: str) -> str:
    """`3 eggs`, but `250 g of flour`."""
    return f"{amount} {name}" if amount.isdigit() else f"{amount} of {name}"
