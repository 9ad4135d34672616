"""Decisions: questions about an input whose answers are probabilities of labels. docs/decisions.md has the formulas.

A question is the end of a conversation, and no text is generated: the log-probabilities of the labels' tokens right
after the generation prompt are the answer.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, fsum, inf
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any, Literal

from tgi_server.router.errors import StartupError
from tgi_server.router.text.conversation import Turn
from tgi_server.router.text.tokenizer import TextTokenizer
from tgi_server.router.text.tokenizer_config import read_object

logger = logging.getLogger(__name__)

Kind = Literal["predicate", "choice", "score"]
Scoring = Literal["labels", "sequences"]
Normalization = Literal["none", "orders", "calibration"]

# Maximum number of orders in which the options of a question are listed.
_MOST_ORDERS = 8
# The neutral input for the calibration of a question.
NEUTRAL = "N/A"
_YES_NO = ("Yes", "No")
# The kinds of questions, as `decision.json` calls them.
_KINDS: Mapping[str, Kind] = {"noul": "predicate", "choice": "choice", "score": "score"}
# Candidates for labels of options: letters first, as published; then other texts that are often single tokens.
_CANDIDATES = (
    *ascii_uppercase,
    *ascii_lowercase,
    *map(str, range(10)),
    *(first + second for first in ascii_uppercase for second in ascii_uppercase),
    *map(str, range(10, 1000)),
)

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question and its options. A predicate has two: descriptions of true and false, which may be empty."""

    kind: Kind
    instructions: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DecisionConfig:
    """A model's `decision.json`: texts of labels, and temperatures, by the kind of question."""

    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    temperature: Mapping[str, float] = field(default_factory=dict)


def read_decision_config(model: Path) -> DecisionConfig:
    """Reads `decision.json` of a model's folder, if there is one. Raises StartupError for invalid content."""
    content = read_object(model / "decision.json")
    if (model / "decision_template.jinja").is_file():
        logger.warning("%s has a decision template, for heads that are not supported; the usual prompt is used", model)
    labels, temperature = content.get("labels") or {}, content.get("temperature") or {}
    try:
        return DecisionConfig(
            {_KINDS[kind]: tuple(map(str, texts)) for kind, texts in labels.items()},
            {_KINDS[kind]: _positive(value) for kind, value in temperature.items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StartupError(f"{model / 'decision.json'} cannot be used: {error!r}") from error


def _positive(value: Any) -> float:
    if not 0 < float(value) < inf:
        raise ValueError(f"a temperature must be positive, not {value}")
    return float(value)


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a question's options, in the order of listing, and the tokens of each."""

    texts: tuple[str, ...]
    tokens: tuple[Tokens, ...]

    @property
    def steps(self) -> dict[Tokens, Tokens]:
        """The tokens that may follow each proper prefix of a label."""
        following: dict[Tokens, dict[int, None]] = {}
        for label in self.tokens:
            for place, token in enumerate(label):
                following.setdefault(label[:place], {})[token] = None
        return {beginning: tuple(tokens) for beginning, tokens in following.items()}

    def logprobs(self, steps: Mapping[Tokens, Mapping[int, float]]) -> list[float]:
        """Returns the log-probability of each label. steps: log-probabilities of tokens after each prefix."""
        return [fsum(steps[label[:place]][token] for place, token in enumerate(label)) for label in self.tokens]


@dataclass(frozen=True, slots=True)
class Probabilities:
    """The result of a question.

    probabilities: of its options, in the question's order. label_mass: share of the labels in the probabilities of all
    tokens.
    """

    probabilities: list[float]
    label_mass: float


def orders_of(question: AskedQuestion, normalization: Normalization) -> list[tuple[int, ...]]:
    """Returns the orders in which to list the options: the given one, or several that do not depend on it."""
    count = len(question.options)
    given = tuple(range(count))
    if normalization != "orders":
        return [given]
    if question.kind != "choice":  # true and false, or levels: both directions
        return [given, given[::-1]]
    sorted_ = tuple(sorted(given, key=lambda each: question.options[each]))
    shifts = dict.fromkeys(number * count // min(count, _MOST_ORDERS) for number in range(min(count, _MOST_ORDERS)))
    return [sorted_[shift:] + sorted_[:shift] for shift in shifts]


def labels_of(
    question: AskedQuestion,
    order: Sequence[int],
    scoring: Scoring,
    tokenizer: TextTokenizer,
    own: Sequence[str] = (),
) -> Labels:
    """Returns the labels of the options, listed in `order`.

    Each label is one token if the tokenizer has enough candidates, else a number with a fixed width. With the scoring
    "sequences", the options themselves are the labels. own: labels of the model's `decision.json`.
    """

    def tokens(text: str) -> Tokens:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    if question.kind == "predicate":
        yes_no = own if len(own) == len(_YES_NO) else _YES_NO
        texts = tuple(yes_no[each] for each in order)
        return Labels(texts, tuple(map(tokens, texts)))
    if scoring == "sequences":
        texts = tuple(question.options[each] for each in order)
        return Labels(texts, tuple(map(tokens, texts)))
    if len(own) >= len(order):
        texts = tuple(own[: len(order)])
        return Labels(texts, tuple(map(tokens, texts)))
    single: dict[Tokens, str] = {}
    for text in _CANDIDATES:
        if len(single) == len(order):
            break
        if len(found := tokens(text)) == 1:
            single.setdefault(found, text)
    if len(single) == len(order):
        return Labels(tuple(single.values()), tuple(single))
    width = len(str(len(order)))
    texts = tuple(f"{number:0{width}}" for number in range(1, len(order) + 1))
    return Labels(texts, tuple(map(tokens, texts)))


def prompt_of(question: AskedQuestion, order: Sequence[int], labels: Labels, scoring: Scoring) -> str:
    """Returns the text of the question, in the same words as System One of `transformers`."""
    lines = [question.instructions]
    texts = labels.texts
    if question.kind == "predicate":
        lines += [
            f"{label}: {question.options[each]}"
            for label, each in zip(texts, order, strict=True)
            if question.options[each]
        ]
        return "\n".join([*lines, f"Answer {texts[0]} or {texts[1]} only."])
    what = "option" if question.kind == "choice" else "level"
    if scoring == "sequences":
        lines += [f"- {question.options[each]}" for each in order]
        return "\n".join([*lines, f"Answer with the text of the {what} that fits best only."])
    lines += [f"{label}. {question.options[each]}" for label, each in zip(texts, order, strict=True)]
    name = "letter" if texts == tuple(ascii_uppercase[: len(texts)]) else "label"
    return "\n".join([*lines, f"Answer with the {name} of the {what} that fits best ({texts[0]} to {texts[-1]}) only."])


def with_question(turns: Sequence[Turn], text: str) -> list[Turn]:
    """Appends the question to the conversation: to the last message if that is the user's, else as a new one."""
    if turns and turns[-1].role == "user":
        last = turns[-1]
        parts = (*last.parts, f"\n\n{text}") if last.images else (f"{last.text}\n\n{text}",)
        return [*turns[:-1], Turn("user", parts, name=last.name)]
    return [*turns, Turn("user", (text,))]


def result_of(
    orders: Sequence[Sequence[int]],
    labels: Sequence[Labels],
    logprobs: Sequence[Sequence[float]],
    neutral: Sequence[float] | None,
    scoring: Scoring,
    temperature: float = 1.0,
) -> Probabilities:
    """Returns the probabilities of the options.

    logprobs: log-probabilities of the labels, for each order. neutral: the same for a neutral input, in the first
    order;
    None: the question is not calibrated.
    """
    count = len(orders[0])
    shares: list[list[float]] = [[] for _ in range(count)]
    for order, own, values in zip(orders, labels, logprobs, strict=True):
        for each, share in zip(order, _shares(own, values, scoring, temperature), strict=True):
            shares[each].append(share)
    probabilities = [fsum(each) / len(orders) for each in shares]
    if neutral is not None:
        expected = _shares(labels[0], neutral, scoring, temperature)
        weights = [own / usual if usual else 0.0 for own, usual in zip(probabilities, expected, strict=True)]
        total = fsum(weights)
        probabilities = [weight / total for weight in weights] if total else probabilities
    masses = [fsum(map(exp, values)) for values in logprobs]
    return Probabilities(probabilities, min(fsum(masses) / len(masses), 1.0))


def _shares(labels: Labels, logprobs: Sequence[float], scoring: Scoring, temperature: float) -> list[float]:
    """Returns the softmax of the labels' log-probabilities; for "sequences", of their means per token."""
    lengths = [len(ids) if scoring == "sequences" else 1 for ids in labels.tokens]
    return softmax([value / length / temperature for value, length in zip(logprobs, lengths, strict=True)])


def softmax(scores: Sequence[float]) -> list[float]:
    highest = max(scores)
    weights = [exp(score - highest) for score in scores]
    total = fsum(weights)
    return [weight / total for weight in weights]


def choice_confidence(probabilities: Sequence[float]) -> float:
    """Returns how far the likeliest option is above chance: 0 if all are equal, 1 if it is certain."""
    chance = 1 / len(probabilities)
    return max(0.0, (max(probabilities) - chance) / (1 - chance))


def score_of(probabilities: Sequence[float]) -> tuple[float, float]:
    """Returns the expected level, and the confidence.

    The confidence is 1 - d / u. d: mean distance from the likeliest level. u: mean distance from the middle if all
    levels were equally likely.
    """
    count = len(probabilities)
    best = max(range(count), key=lambda level: probabilities[level])
    distance = fsum(probability * abs(level - best) for level, probability in enumerate(probabilities))
    uniform = fsum(abs(level - (count - 1) / 2) for level in range(count)) / count
    score = fsum(level * probability for level, probability in enumerate(probabilities))
    return score, max(0.0, 1 - distance / uniform)
