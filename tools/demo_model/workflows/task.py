"""A task as an assistant knows it, and the forms in which callers write down what they know."""

from dataclasses import dataclass
from random import Random

from tools.demo_model.cooking.dishes import dish
from tools.demo_model.diy.projects import PROJECTS
from tools.demo_model.exchange import capital

_LABELS = {
    "title": ("Title", "Task", "Task", "Name"),
    "step": ("Step", "Step", "Current step", "Text"),
    "before": ("Previous steps", "Previous steps", "Steps so far"),
    "ingredients": ("Ingredients", "Ingredients", "Needed"),
    "domain": ("Domain", "Area"),
    "description": ("Description", "About"),
    "ingredient": ("Ingredient", "Ingredient", "Original ingredient"),
    "amount": ("Amount", "Quantity"),
    "original": ("Original", "Old"),
    "replacement": ("Replacement", "New"),
    "assistant": ("Assistant", "Assistant", "Agent"),
    "user": ("User", "User", "Person"),
    "wants": ("What the user wants", "Intent"),
    "details": ("Details", "Details", "Notes"),
}


@dataclass(frozen=True)
class Task:
    """Something that is cooked or built: `needs` are names of ingredients, or of tools and materials."""

    title: str
    domain: str
    steps: tuple[str, ...]
    needs: tuple[str, ...]


def task(rng: Random) -> Task:
    """A dish or a project."""
    if rng.random() < 0.5:
        made = dish(rng)
        return Task(capital(made.title), "cooking", made.steps, tuple(name for name, _ in made.ingredients))
    job = rng.choice(PROJECTS)
    return Task(capital(job.title), "DIY", job.steps, (*job.tools, *job.materials))


def form(rng: Random, *fields: tuple[str, str]) -> str:
    """The fields that are not empty, one a line after a label; a lone field may stand without one."""
    filled = [(name, value) for name, value in fields if value]
    if len(filled) == 1 and rng.random() < 0.3:
        return filled[0][1]
    return "\n".join(f"{rng.choice(_LABELS[name])}: {value}" for name, value in filled)


def sometimes(rng: Random, text: str, chance: float = 0.5) -> str:
    """The text or nothing."""
    return text if rng.random() < chance else ""
