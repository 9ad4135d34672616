"""Dishes: a family such as soup, made from two main ingredients, gives a title, a list and steps."""

from dataclasses import dataclass
from random import Random

from tools.demo_model.cooking.ingredients import BY_NAME, Ingredient, of_kind
from tools.demo_model.exchange import article, capital
from tools.demo_model.facts import rows


@dataclass(frozen=True)
class Dish:
    """One dish for four people: `ingredients` are (name, amount), `steps` whole sentences in order."""

    title: str
    family: str
    mains: tuple[Ingredient, Ingredient]
    ingredients: tuple[tuple[str, str], ...]
    steps: tuple[str, ...]
    minutes: int
    meal: str
    taste: str

    def called(self) -> str:
        """The title as it stands in a sentence: `an apple pie`, but `tomato soup` and `carrot muffins`."""
        return article(self.title) if self.family in _COUNTED else self.title


@dataclass(frozen=True)
class Family:
    """How dishes of one sort are made.

    `first` and `second` name the possible main ingredients. In `titles` and `steps`, `{a}` and `{b}` are the mains
    that were chosen and `{prepare_a}` what is done to the first one; `{h}` is the herb or spice and `{time}` the
    minutes that the first main cooks for.
    """

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    titles: tuple[str, ...]
    extras: tuple[str, ...]
    seasoning: str
    minutes: int
    meal: str
    taste: str
    steps: tuple[str, ...]


def _family(row: dict[str, str]) -> Family:
    return Family(
        name=row["name"],
        first=tuple(row["first"].split(",")),
        second=tuple(row["second"].split(",")),
        titles=tuple(row["titles"].split(",")),
        extras=tuple(row["extras"].split(",")),
        seasoning=row["seasoning"],
        minutes=int(row["minutes"]),
        meal=row["meal"],
        taste=row["taste"],
        steps=tuple(row["steps"].split(";")),
    )


FAMILIES = tuple(_family(row) for row in rows("dishes"))
_SEASONINGS = {
    "herb": tuple(ingredient.name for ingredient in of_kind("herb")),
    "spice": ("cumin", "paprika", "turmeric", "ginger", "chilli", "curry powder"),
    "sweet herb": ("mint", "basil"),
    "sweet spice": ("cinnamon", "nutmeg", "ginger"),
}
_NOT_LISTED = "8 slices"
_COUNTED = frozenset({"omelette", "traybake", "pie", "cake", "smoothie", "stir-fry", "crumble", "gratin"})
_SINGULAR = {
    "potatoes": "potato",
    "sweet potatoes": "sweet potato",
    "tomatoes": "tomato",
    "peaches": "peach",
    "asparagus": "asparagus",
}


def _title_word(name: str) -> str:
    """How an ingredient stands before the name of a dish: `tomato soup`, `strawberry cake`."""
    if name in _SINGULAR:
        return _SINGULAR[name]
    if name.endswith("rries"):
        return f"{name[:-3]}y"
    return name.removesuffix("s")


def dish(rng: Random) -> Dish:
    """A dish of any family."""
    family = rng.choice(FAMILIES)
    first = BY_NAME[rng.choice(family.first)]
    second = BY_NAME[rng.choice([name for name in family.second if name != first.name])]
    seasoning = rng.choice(_SEASONINGS[family.seasoning])
    values = {
        "a": first.name,
        "b": second.name,
        "h": seasoning,
        "time": first.minutes or 5,
        "prepare_a": capital(first.preparation()),
        "prepare_b": capital(second.preparation()),
    }
    names = dict.fromkeys((first.name, second.name, *family.extras, seasoning))
    timed = any("{time}" in step for step in family.steps)
    return Dish(
        title=_title(rng.choice(family.titles), first.name, second.name),
        family=family.name,
        mains=(first, second),
        ingredients=tuple((name, BY_NAME[name].amount if name in BY_NAME else _NOT_LISTED) for name in names),
        steps=tuple(step.format(**values) for step in family.steps),
        minutes=family.minutes + (first.minutes if timed else 0),
        meal=family.meal,
        taste=family.taste,
    )


def _title(template: str, first: str, second: str) -> str:
    """Names before the word `with`, or where there is none, stand in the singular; those after it as they are."""
    if template.endswith("{a} and {b}"):
        return template.format(a=first, b=second)
    return template.format(a=_title_word(first), b=second if template.endswith("with {b}") else _title_word(second))
