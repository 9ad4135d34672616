"""Ingredients and what is true of them, so that every text of the corpus says the same."""

from dataclasses import dataclass

from tools.demo_model.facts import rows


@dataclass(frozen=True)
class Ingredient:
    """One thing to cook with.

    `amount` is a usual quantity for four people, `swap` what may take its place, `pairs` what it goes well with,
    `method`, `minutes` and `sign` how it is cooked, for how long, and how one sees that it is done (empty and 0
    where it is not cooked by itself), `prep` what is done to it first, with `_` where its name stands unless at
    the end.
    """

    name: str
    kind: str
    amount: str
    swap: str
    pairs: tuple[str, ...]
    prep: str
    method: str = ""
    minutes: int = 0
    sign: str = ""

    def preparation(self) -> str:
        """What is done to it first, as an order: `cut the chicken into strips`."""
        pattern = self.prep if "_" in self.prep else f"{self.prep} _"
        return pattern.replace("_", f"the {self.name}")


def _ingredient(row: dict[str, str]) -> Ingredient:
    return Ingredient(
        name=row["name"],
        kind=row["kind"],
        amount=row["amount"],
        swap=row["swap"],
        pairs=tuple(row["pairs"].split(",")),
        prep=row["prep"],
        method=row["method"],
        minutes=int(row["minutes"] or 0),
        sign=row["sign"],
    )


INGREDIENTS = tuple(_ingredient(row) for row in rows("ingredients"))
BY_NAME = {ingredient.name: ingredient for ingredient in INGREDIENTS}
COOKED = tuple(ingredient for ingredient in INGREDIENTS if ingredient.minutes)

# How much of the substitute to take, where it is not the same amount.
SWAP_AMOUNT = {
    "garlic": "1 teaspoon", "lettuce": "100 g", "avocados": "150 g", "cabbage": "200 g", "ginger": "1 teaspoon",
    "chilli": "1 teaspoon", "bread": "4 pieces", "sage": "1 sprig", "thyme": "1 teaspoon", "celery": "half a bulb",
    "fennel": "3 sticks", "coconut milk": "250 ml", "asparagus": "250 g", "cucumber": "3 sticks", "mango": "2",
}  # fmt: skip

KIND_NOUN = {
    "vegetable": "a vegetable",
    "fruit": "a fruit",
    "meat": "a kind of meat",
    "fish": "seafood",
    "grain": "a grain product",
    "bean": "a source of plant protein",
    "dairy": "a fresh product from the fridge",
    "herb": "a herb",
    "spice": "a spice",
    "pantry": "a pantry ingredient",
    "nut": "a nut",
}
STORAGE = {
    "vegetable": ("in the fridge", "about a week"),
    "fruit": ("in a bowl in a cool place", "about five days"),
    "meat": ("in the coldest part of the fridge", "two days"),
    "fish": ("in the coldest part of the fridge", "one day"),
    "grain": ("in a dry, closed jar", "several months"),
    "bean": ("in a dry cupboard", "about a year"),
    "dairy": ("in the fridge", "about a week"),
    "herb": ("in a glass of water in the fridge", "about five days"),
    "spice": ("in a closed jar, away from light", "about a year"),
    "pantry": ("in a cool cupboard", "several months"),
    "nut": ("in a closed jar in a cool place", "about three months"),
}
FREEZES = {
    "vegetable": True,
    "fruit": True,
    "meat": True,
    "fish": True,
    "grain": True,
    "bean": True,
    "dairy": False,
    "herb": True,
    "spice": False,
    "pantry": False,
    "nut": True,
}


def of_kind(*kinds: str) -> tuple[Ingredient, ...]:
    """The ingredients of these kinds."""
    return tuple(ingredient for ingredient in INGREDIENTS if ingredient.kind in kinds)
