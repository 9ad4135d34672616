"""Sentences of which there are more than can be learned by heart, so that the model has to look at its input.

A step that is summarised, rewritten or repeated must be copied from the prompt. Were there only a few hundred steps,
the model would learn to recognise them, and would answer a new one with the nearest that it knows.
"""

from random import Random

from tools.demo_model.cooking.ingredients import INGREDIENTS
from tools.demo_model.diy.tools import TOOLS
from tools.demo_model.exchange import capital
from tools.demo_model.facts import words
from tools.demo_model.offtopic import name

_ORDERS, _THINGS, _LOOKS = words("order"), words("thing"), words("look")
_PLACES, _WAYS = words("place"), words("way")
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def thing(rng: Random) -> str:
    """The name of a thing: of the household, of the kitchen, of the workshop, or one that nobody has heard."""
    chance = rng.random()
    if chance < 0.5:
        noun = rng.choice(_THINGS)
    elif chance < 0.7:
        noun = rng.choice(INGREDIENTS).name
    elif chance < 0.8:
        noun = rng.choice(TOOLS).name
    else:
        noun = name(rng).lower()
    return f"{rng.choice(_LOOKS)} {noun}" if rng.random() < 0.3 else noun


def sentence(rng: Random, about: str = "") -> str:
    """An order such as `Wash the old table with the sponge.`; `about` is a thing that it is to name."""
    first = about or thing(rng)
    sort = rng.randrange(6)
    order = rng.choice(_ORDERS)
    if sort == 0:
        order += f" the {first}"
    elif sort == 1:
        order += f" the {first} {rng.choice(_PLACES)}"
    elif sort == 2:
        order += f" the {first} and the {thing(rng)}"
    elif sort == 3:
        order += f" the {first} with the {thing(rng)}"
    elif sort == 4:
        order += f" the {first} and {rng.choice(_ORDERS)} the {thing(rng)}"
    else:
        order += f" the {first} for {rng.randint(2, 90)} minutes"
    if rng.random() < 0.25:
        order += f" {rng.choice(_WAYS)}"
    return capital(f"{order}.")


def amount(rng: Random) -> str:
    """Some quantity, such as `37 g` or `three pieces`."""
    if rng.random() < 0.2:
        return f"{rng.choice(_NUMBERS)} {rng.choice(('pieces', 'slices', 'cups', 'spoons', 'tins', 'handfuls'))}"
    if rng.random() < 0.3:
        return str(rng.randint(1, 24))
    units = ("g", "g", "ml", "kg", "l", "cups", "tablespoons", "teaspoons", "pieces", "slices", "oz")
    return f"{rng.randint(1, 999)} {rng.choice(units)}"
