"""Conversations whose later questions lean on earlier ones: the dish of the talk, or the name of the person."""

from random import Random

from tools.demo_model.cooking.dishes import dish
from tools.demo_model.cooking.questions import duration
from tools.demo_model.cooking.recipes import instructions as recipe_instructions
from tools.demo_model.diy.projects import PROJECTS
from tools.demo_model.diy.questions import instructions as project_instructions
from tools.demo_model.exchange import Exchange, agreement, article, listing, vary
from tools.demo_model.offtopic import name

Thread = list[Exchange]


def cooking_thread(rng: Random) -> Thread:
    """A recipe, then questions about it."""
    made = dish(rng)
    start = Exchange(
        vary(rng, "how do I make {d}?", "give me a recipe for {d}.", "I want to make {d}.", d=made.called()),
        recipe_instructions(rng, made),
    )
    later = [
        _steps(rng, made.steps),
        _steps(rng, made.steps),
        Exchange(
            vary(rng, "how long does it take?", "how long will that be?", "how much time do I need?"),
            vary(rng, "it takes about {t}.", "{d} {takes} about {t}.", d=made.called(), t=duration(made.minutes),
                 **agreement(made.title)),
        ),
        Exchange(
            vary(rng, "what do I need[ for that| for it|]?", "which ingredients do I need?"),
            f"You need {listing([ingredient for ingredient, _ in made.ingredients])}.",
        ),
        Exchange(
            vary(rng, "what does it taste like?", "is it good?"),
            vary(rng, "{d} {be} {t}.", d=made.called(), t=made.taste, **agreement(made.title)),
        ),
    ]  # fmt: skip
    return [start, *rng.sample(later, rng.randint(1, 3))]


def diy_thread(rng: Random) -> Thread:
    """A project, then questions about it."""
    job = rng.choice(PROJECTS)
    start = Exchange(
        vary(rng, "how do I {j}?", "I want to {j}.", "help me {j}.", "tell me how to {j}.", j=job.title),
        project_instructions(rng, job),
    )
    later = [
        _steps(rng, job.steps),
        _steps(rng, job.steps),
        Exchange(
            vary(rng, "how long does it take?", "how long will that be?", "how much time do I need?"),
            f"It takes about {duration(job.minutes)}.",
        ),
        Exchange(
            vary(rng, "which tools do I need[ for that|]?", "what tools does it take?"),
            f"You need {listing([article(tool) for tool in job.tools])}.",
        ),
        Exchange(vary(rng, "is it safe?", "what should I be careful about?", "any safety tips?"), job.caution),
    ]
    return [start, *rng.sample(later, rng.randint(1, 3))]


def name_thread(rng: Random) -> Thread:
    """The person says who they are and asks for it later."""
    who = name(rng)
    start = Exchange(
        vary(rng, "my name is {n}.", "I am {n}.", "hi, I am {n}.", "hello, my name is {n}.", n=who),
        vary(rng, "nice to meet you, {n}![ What would you like to make?| How can I help you?|]", n=who),
    )
    question = Exchange(vary(rng, "what is my name?", "do you know my name?", "who am I?"), f"Your name is {who}.")
    return [start, question] if rng.random() < 0.7 else [start]


def _steps(rng: Random, steps: tuple[str, ...]) -> Exchange:
    index = rng.randrange(len(steps))
    if rng.random() < 0.3:
        return Exchange(vary(rng, "what is the last step?", "how does it end?"), steps[-1])
    return Exchange(
        vary(rng, "what is step {n}?", "read step {n}.", "say step {n} again.", "tell me step {n}.", n=index + 1),
        steps[index],
    )


THREADS = (cooking_thread, diy_thread, name_thread)
