"""Subjects that the demo model knows nothing about, so that it learns to say so by their names."""

from random import Random

from tools.demo_model.facts import words

_SUBJECTS, _ADJECTIVES, _FIELDS = words("subject"), words("adjective"), words("field")
_SYLLABLES = words("syllable")


def subject(rng: Random) -> str:
    """A subject from a list, one put together from an adjective and a noun, or a name that nobody has heard.

    The made-up names are there so that the model learns to repeat a word that it does not know.
    """
    chance = rng.random()
    if chance < 0.4:
        return rng.choice(_SUBJECTS)
    if chance < 0.65:
        return f"{rng.choice(_ADJECTIVES)} {rng.choice(_FIELDS)}"
    invented = name(rng) if rng.random() < 0.5 else name(rng).lower()
    return f"{invented} {rng.choice(_FIELDS)}" if rng.random() < 0.3 else invented


def name(rng: Random) -> str:
    """A name of two to four syllables that nobody has."""
    return "".join(rng.choices(_SYLLABLES, k=rng.choice((2, 2, 3, 4)))).capitalize()
