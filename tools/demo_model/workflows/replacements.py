"""Substitutes as JSON, and steps rewritten for a substitute."""

import json
from random import Random

from tools.demo_model.cooking.dishes import Dish, dish
from tools.demo_model.cooking.ingredients import BY_NAME, INGREDIENTS, SWAP_AMOUNT, Ingredient
from tools.demo_model.exchange import Exchange, Source, capital, measured, vary
from tools.demo_model.sentences import amount, sentence, thing
from tools.demo_model.workflows.task import form, sometimes

_REPLACE = (
    "Find a replacement for the ingredient and answer in JSON, with the keys name and amount. Where the assistant has "
    "already proposed one, take that. Give the amount that stands for the original amount."
)
_REWRITE = "Rewrite the step with the new ingredients. Change nothing else."


def replacement_json(rng: Random) -> Exchange:
    """A substitute with its amount, as JSON; the one that the assistant has proposed, where it has."""
    made = dish(rng)
    old = BY_NAME[rng.choice([name for name, _ in made.ingredients if name in BY_NAME])]
    proposed = rng.choice(("", "", rng.choice(INGREDIENTS).name, thing(rng)))
    new, new_amount = proposed or old.swap, SWAP_AMOUNT.get(old.name, "")
    old_amount = old.amount
    if new != old.swap or not new_amount:
        new_amount = old_amount = _other_amount(rng, old)
    context = form(
        rng,
        ("title", sometimes(rng, capital(made.title), 0.7)),
        *_ingredient(rng, old.name, old_amount),
        ("user", sometimes(rng, _complaint(rng, old.name), 0.5)),
        ("assistant", _proposal(rng, old.name, proposed) if proposed else ""),
    )
    return Exchange(_replacement_request(rng, old.name), json.dumps({"name": new, "amount": new_amount}), context)


def _replacement_request(rng: Random, name: str) -> str:
    if rng.random() < 0.4:
        return _REPLACE
    return vary(
        rng,
        "find a [replacement|substitute] for the ingredient[ and answer in JSON|. Answer in JSON].",
        "replace the ingredient. Answer with [JSON|a JSON object] [that has|with] the keys name and amount.",
        "suggest a [replacement|substitute] for {x} as JSON with name and amount.",
        "which ingredient [replaces|can replace] {x}? Reply in JSON: {j}",
        "suggest an ingredient to use instead of {x}, with its amount[, as JSON|. Answer with a JSON object].",
        "the user wants to replace {x}. [Name|Give] the new ingredient and its amount as JSON[, such as {j}|].",
        x=name,
        j='{"name": "...", "amount": "..."}',
    )


def _ingredient(rng: Random, name: str, much: str) -> list[tuple[str, str]]:
    """The ingredient and its amount in two fields or in one."""
    if rng.random() < 0.5:
        return [("ingredient", name), ("amount", much)]
    return [("ingredient", rng.choice((f"{name}, {much}", f"{name} ({much})", measured(much, name))))]


def _complaint(rng: Random, name: str) -> str:
    return vary(
        rng,
        "I [have no|do not have|don't like|cannot eat] {x}.",
        "what can I use instead of {x}?",
        "replace the {x}.",
        x=name,
    )


def _proposal(rng: Random, old: str, new: str) -> str:
    return vary(
        rng,
        "[you can|you could] use {y} instead of {x}.",
        "how about {y}?",
        "try {y} in place of {x}.",
        "{y} would work.",
        "I suggest {y}.",
        x=old,
        y=new,
    )


def _other_amount(rng: Random, usual: Ingredient) -> str:
    """An amount for another number of people, at times in another unit: it is copied from the prompt, not known."""
    number, _, unit = usual.amount.partition(" ")
    if not number.isdigit() or rng.random() < 0.4:
        return amount(rng)
    if unit in ("g", "ml"):
        return f"{rng.randint(5, 999)} {unit}"
    return f"{rng.randint(2, 12)} {unit}".strip() if not unit or unit.endswith("s") else usual.amount


def step_rewrite(rng: Random) -> Exchange:
    """A step in which one or two ingredients are replaced by others."""
    made, name, step = _step_with_main(rng)
    new = rng.choice([BY_NAME[name].swap, rng.choice(INGREDIENTS).name, thing(rng)])
    if rng.random() < 0.5:
        name = thing(rng)
        step = sentence(rng, about=name)
    elif rng.random() < 0.4:
        return _measured_rewrite(rng, made, BY_NAME[name])
    if rng.random() < 0.4:
        return Exchange(
            _REWRITE,
            step.replace(name, new),
            form(
                rng,
                ("title", sometimes(rng, capital(made.title), 0.7)),
                ("step", step),
                ("original", f"{name} ({amount(rng)})" if rng.random() < 0.6 else name),
                ("replacement", f"{new} ({amount(rng)})" if rng.random() < 0.6 else new),
            ),
        )
    request = vary(
        rng,
        "rewrite the [step|text] with the new ingredient.",
        "replace the ingredient in the step.",
        "rewrite the step so that it uses {y} instead of {x}.",
        "change the step: use {y} instead of {x}.",
        "adjust the step to the [replaced ingredient|replacement].",
        "rewrite the recipe step: {y} replaces {x}.",
        x=name,
        y=new,
    )
    change = vary(
        rng, "replace {x} with {y}.", "use {y} instead of {x}.", "old: {x}\nNew: {y}", "{x} -> {y}", x=name, y=new
    )
    told = form(rng, ("title", sometimes(rng, capital(made.title), 0.4)), ("step", step))
    parts = [told, change] if rng.random() < 0.7 else [change, told]
    return Exchange(request, step.replace(name, new), "\n".join(parts))


def _measured_rewrite(rng: Random, made: Dish, old: Ingredient) -> Exchange:
    """A step that says how much to take: name and amount both change."""
    new = BY_NAME[rng.choice(INGREDIENTS).name]
    before, after = _other_amount(rng, old), _other_amount(rng, new)
    template = vary(
        rng,
        "[add|stir in|fold in|mix in] {{m}} and [stir well|cook for {t} minutes|mix until smooth].",
        "put {{m}} [in a bowl|in a large pan|on a plate][ and set it aside|].",
        "[heat|warm|cook] {{m}} [in a pan|over low heat] for {t} minutes.",
        "[whisk|mix] {{m}} with {o}.",
        t=rng.randint(2, 30),
        o=rng.choice(made.ingredients)[0],
    )
    context = form(
        rng,
        ("title", sometimes(rng, capital(made.title), 0.7)),
        ("step", template.format(m=measured(before, old.name))),
        ("original", f"{old.name} ({before})"),
        ("replacement", f"{new.name} ({after})"),
    )
    return Exchange(_REWRITE, template.format(m=measured(after, new.name)), context)


def step_kept(rng: Random) -> Exchange:
    """A step that does not mention the ingredient stays as it is."""
    made, name, _ = _step_with_main(rng)
    others = [step for step in made.steps if name not in step]
    if not others:
        return step_rewrite(rng)
    step, new = rng.choice(others), BY_NAME[name].swap
    request = vary(rng, "rewrite the step with the new ingredient.", "adjust the step to the replaced ingredient.")
    return Exchange(request, step, f"{form(rng, ('step', step))}\nReplace {name} with {new}.")


def _step_with_main(rng: Random) -> tuple[Dish, str, str]:
    """A dish, the name of one of its main ingredients and a step that has the name in it."""
    while True:
        made = dish(rng)
        name = rng.choice([main.name for main in made.mains])
        if steps := [step for step in made.steps if name in step]:
            return made, name, rng.choice(steps)


SOURCES = (Source(replacement_json, 3), Source(step_rewrite, 3), Source(step_kept, 0.3))
