"""Questions that the steps in the input answer."""

from random import Random

from tools.demo_model.exchange import Exchange, Source, numbered, vary
from tools.demo_model.sentences import sentence
from tools.demo_model.workflows.task import task

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def about_step(rng: Random) -> Exchange:
    """The n-th step, the next one, the last one, or how many there are."""
    work = task(rng)
    steps, title = work.steps, work.title
    if rng.random() < 0.4:
        steps, title = tuple(sentence(rng) for _ in range(rng.randint(3, 6))), ""
    index = rng.randrange(len(steps))
    sort = rng.randrange(4)
    if sort == 0:
        request = vary(
            rng,
            "what is step {n}?",
            "read step {n}.",
            "what do I do in step {n}?",
            "what is the {o} step?",
            n=index + 1,
            o=_ORDINALS[index],
        )
        answer = steps[index]
    elif sort == 1:
        index = min(index, len(steps) - 2)
        request = vary(
            rng,
            "what comes after step {n}?",
            "I have done step {n}. What is next?",
            "what is the step after {n}?",
            n=index + 1,
        )
        answer = steps[index + 1]
    elif sort == 2:
        request = vary(rng, "what is the last step?", "how does it end?", "what do I do at the end?")
        answer = steps[-1]
    else:
        request = vary(rng, "how many steps are there?", "how many steps does it have?")
        answer = f"There are {len(steps)} steps."
    heading = rng.choice((f"{title}:\n", f"Task: {title}\n", "")) if title else ""
    return Exchange(request, answer, f"{heading}{numbered(steps)}")


SOURCES = (Source(about_step, 3),)
