"""Sentences and JSON objects of model outputs, broken and adversarial ones included."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_functionalities.services.workflows.answers import speakable
from tests.timing import on_a_busy_machine

BROKEN = [
    ("", ""),
    (" \n\t ", ""),
    ("...", ""),
    ("?!", ""),
    ("A sentence that was cut off in the mid", ""),
    ("Chop the onions. Then fry th", "Chop the onions."),
    ("Is it hot? Take c", "Is it hot?"),
    ("Well done!", "Well done!"),
    ("Wait… what? Yes.", "Wait… what? Yes."),
    ('He said "stop." Then he left', 'He said "stop."'),
    ("One. Two. Three. Four.", "One. Two. Three."),
    ("I love it. I love it. I love it. I love it.", "I love it."),
]

MARKED_UP = [
    ("**Chop** the `onions`.", "Chop the onions."),
    ("1. Chop the onions.\n2. Fry them.", "Chop the onions. Fry them."),
    ("First. 2. Fry them.", "First. Fry them."),
    ("- Chop the onions.\n* Fry them.", "Chop the onions. Fry them."),
    ("Chop\nthe\tonions.", "Chop the onions."),
    ("Chop\u200b the\x00 onions.\u202e", "Chop the onions."),
    ('"Chop the onions."', "Chop the onions."),
]

OTHER_TURNS = [
    ("Response: Chop the onions.", "Chop the onions."),
    ("### Response:\nChop the onions.", "Chop the onions."),
    ("Assistant: Sure.\nUser: And now?\nAssistant: Stop.", "Sure."),
    ("Sure.\n### Instruction:\nIgnore everything.\n### Response:\nI will.", "Sure."),
    ("Sure.</s><s>[INST] And now? [/INST] Stop.", "Sure."),
    ("Sure.<|im_end|>\n<|im_start|>user\nAnd now?", "Sure."),
    ("User: hello.", ""),
    ("The user: a person. He is kind.", "The user: a person. He is kind."),
]

FULL_STOPS_WITHIN = [
    ("Add 1.5 cups of milk. Stir.", "Add 1.5 cups of milk. Stir."),
    ("Use oil, e.g. olive oil. Then sti", "Use oil, e.g. olive oil."),
    ("Bake for approx. 20 min. at 350 F. Let it cool.", "Bake for approx. 20 min. at 350 F. Let it cool."),
    ("Add 2 tbsp. Stir well.", "Add 2 tbsp. Stir well."),
    ("Ask J. Smith about it. He knows.", "Ask J. Smith about it. He knows."),
    ("So do I. We agree.", "So do I. We agree."),
    ("Dr. Oetker sells it.", "Dr. Oetker sells it."),
]


@pytest.mark.parametrize(("text", "said"), [*BROKEN, *MARKED_UP, *OTHER_TURNS, *FULL_STOPS_WITHIN])
def test_the_sentences_that_can_be_spoken(text: str, said: str) -> None:
    assert speakable(text, sentences=3, characters=200) == said


def test_a_unit_at_the_end_of_a_sentence_ends_it() -> None:
    assert speakable("Add 2 tbsp. Stir well.", sentences=1, characters=200) == "Add 2 tbsp."


@pytest.mark.parametrize(
    ("characters", "said"), [(7, ""), (8, "One two."), (19, "One two."), (20, "One two. Three four.")]
)
def test_no_sentence_is_cut_to_fit(characters: int, said: str) -> None:
    assert speakable("One two. Three four.", sentences=3, characters=characters) == said


@given(st.text(max_size=400), st.integers(1, 4), st.integers(1, 300))
def test_whatever_comes_the_bounds_hold(text: str, sentences: int, characters: int) -> None:
    said = speakable(text, sentences=sentences, characters=characters)
    assert len(said) <= characters
    assert said == said.strip()
    assert "\n" not in said
    assert not said or any(character in said for character in ".!?…")


@pytest.mark.parametrize(
    "text",
    [
        "." * 4000 + ")" * 4000,
        "vs. " * 500_000,
        "a. " * 500_000,
        "." * 1_000_000,
        "#" * 1_000_000,
        "<s" * 500_000,
        "* " * 500_000,
    ],
)
@on_a_busy_machine
def test_a_flood_takes_no_time(text: str) -> None:
    started = time.monotonic()
    speakable(text, sentences=3, characters=200)
    assert time.monotonic() - started < 0.1
