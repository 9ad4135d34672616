"""Facts as JSON objects with the keys that were asked for."""

import json
from random import Random

from tools.demo_model.cooking.dishes import dish
from tools.demo_model.cooking.ingredients import INGREDIENTS
from tools.demo_model.diy.projects import PROJECTS
from tools.demo_model.exchange import Exchange, Source, listing, vary


def structured(rng: Random) -> Exchange:
    """A recipe, a project or an ingredient as a JSON object."""
    record = rng.choice((_recipe, _project, _ingredient))(rng)
    first, *others = record
    kept = [first, *rng.sample(others, rng.randint(1, len(others)))]
    subject = record[first]
    request = vary(
        rng,
        "[describe {s} as JSON.|give me {s} as a JSON object.|write a JSON object about {s}.|JSON for {s}.] "
        "[Use the keys {k}.|The keys are {k}.|Keys: {k}.]",
        s=subject,
        k=listing(kept),
    )
    return Exchange(request, json.dumps({key: record[key] for key in kept}))


def _recipe(rng: Random) -> dict[str, object]:
    made = dish(rng)
    return {
        "title": made.title,
        "minutes": made.minutes,
        "meal": made.meal,
        "servings": 4,
        "ingredients": [name for name, _ in made.ingredients],
    }


def _project(rng: Random) -> dict[str, object]:
    job = rng.choice(PROJECTS)
    return {
        "project": job.title,
        "minutes": job.minutes,
        "tools": list(job.tools),
        "materials": list(job.materials),
        "easy": job.level == "easy",
    }


def _ingredient(rng: Random) -> dict[str, object]:
    thing = rng.choice(INGREDIENTS)
    return {
        "name": thing.name,
        "kind": thing.kind,
        "amount": thing.amount,
        "pairs": list(thing.pairs),
        "substitute": thing.swap,
    }


SOURCES = (Source(structured, 1.5),)
