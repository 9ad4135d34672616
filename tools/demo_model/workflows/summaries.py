"""Texts that are longer than they need to be, and what is left of them; descriptions of tasks."""

from random import Random

from tools.demo_model.cooking import recipes
from tools.demo_model.cooking.dishes import dish
from tools.demo_model.cooking.ingredients import INGREDIENTS
from tools.demo_model.cooking.questions import description
from tools.demo_model.diy import questions as diy
from tools.demo_model.diy.projects import PROJECTS
from tools.demo_model.exchange import Exchange, Source, capital, listing, vary
from tools.demo_model.offtopic import subject
from tools.demo_model.sentences import sentence, thing
from tools.demo_model.workflows.task import form, sometimes, task

_SUMMARISE = (
    "Write a short summary of the step for somebody who listens, in at most two sentences. Keep every amount, time and "
    "temperature that is needed to do it, and add nothing."
)
_DESCRIBE = (
    "Write an appealing description of this recipe or project in one or two sentences, for somebody who decides "
    "whether to start it. Mention only ingredients that are listed."
)
_ASIDES = (
    "This takes a little patience.",
    "Take your time here.",
    "You will see the difference at once.",
    "It is not as hard as it sounds.",
    "Many people rush this part, but it is worth doing well.",
    "If you have a helper, now is a good moment to ask.",
    "Nothing can go wrong here.",
    "Put everything you need within reach.",
    "This is the part that most people like best.",
    "It should look even.",
    "Do not worry if it is not perfect.",
)
_REMARKS = (
    "{s} has changed a lot over the years.",
    "many people read about {s} every day.",
    "{s} is taught in schools.",
    "some people find {s} hard to understand.",
    "there are many books about {s}.",
    "{s} can be a lot of fun.",
    "a friend of mine talks about {s} all the time.",
    "last week there was a long programme about {s} on the radio.",
    "most of us hear about {s} for the first time as children.",
    "{s} and {z} have much in common.",
    "in {z}, {s} is well known.",
)


def step_summary(rng: Random) -> Exchange:
    """A step with asides; its summary leaves them out."""
    work, count = task(rng), rng.choice((1, 2))
    start = rng.randrange(len(work.steps) - 1)
    kept = work.steps[start : start + count]
    if rng.random() < 0.6:
        kept = tuple(sentence(rng) for _ in range(count))
    asides = rng.sample(_ASIDES, len(kept))
    text = " ".join(f"{step} {aside}" if rng.random() < 0.7 else step for step, aside in zip(kept, asides, strict=True))
    if rng.random() < 0.3:
        context = form(rng, ("title", work.title), ("step", " ".join(kept)), ("details", " ".join(asides)))
    else:
        context = form(rng, ("title", sometimes(rng, work.title)), ("step", text))
    return _asked(rng, context, " ".join(kept))


def text_summary(rng: Random) -> Exchange:
    """A paragraph about anything; its summary is its first sentence."""
    if rng.random() < 0.3:
        kept, rest = sentence(rng), [sentence(rng) for _ in range(rng.randint(1, 3))]
        return _asked(rng, " ".join([kept, *rest]), kept)
    if rng.random() < 0.3:
        first = description(rng, rng.choice(INGREDIENTS))
        return _asked(rng, f"{first} {rng.choice(_ASIDES)}", f"{first.split('. ')[0].rstrip('.')}.")
    main, other = subject(rng), subject(rng)
    remarks = [vary(rng, remark, s=main, z=other) for remark in rng.sample(_REMARKS, rng.choice((2, 3, 4)))]
    return _asked(rng, " ".join(remarks), remarks[0])


def _asked(rng: Random, context: str, answer: str) -> Exchange:
    """The text with a request for a summary before it, in one line at times."""
    if rng.random() < 0.25:
        return Exchange(f"{vary(rng, '[summarise|summarize|summary|in short]')}: {context}", answer)
    if rng.random() < 0.35:
        return Exchange(_SUMMARISE, answer, context)
    request = vary(
        rng,
        "summarise the following [step|text|instructions|paragraph].",
        "summarise the [text|step|input][ in one sentence|].",
        "summarize [the input|this|the text|the step][ briefly|].",
        "write a [short|brief|concise] summary[ of the step| of the text| of the input|].",
        "give a [short|brief|] summary of this.",
        "shorten this [text|step].",
        "what does this say in short?",
        "rewrite the step so that it is [shorter|short and easy to listen to].",
        "write a short summary of the step for somebody who listens.",
        "summarise the step of the task[ {q}|] in at most two sentences.",
        q="below",
    )
    return Exchange(" ".join(request.split()), answer, context)


def task_description(rng: Random) -> Exchange:
    """A title, with what is needed at times, and two sentences about it."""
    request = vary(
        rng,
        "write [a short|an appealing|a brief|a] description of the [task|recipe|project].",
        "describe [this|the] [task|recipe|project][ in two sentences| in one or two sentences|].",
        "write [a description|one or two sentences] about the [task|title].",
        "write a description for the title[ below|].",
        "write an appealing description of this recipe or project.",
        "introduce the task to the user.",
    )
    request = _DESCRIBE if rng.random() < 0.4 else " ".join(request.split())
    if rng.random() < 0.25:
        title, parts = capital(thing(rng)), [thing(rng) for _ in range(rng.randint(2, 4))]
        needs, domain = ", ".join(parts), rng.choice(("cooking", "DIY"))
        answer = vary(rng, "with this task you make {t}. You need {n}.", t=title.lower(), n=listing(parts))
        return Exchange(request, answer, form(rng, ("title", title), ("domain", domain), ("ingredients", needs)))
    if rng.random() < 0.6:
        made = dish(rng)
        needs = ", ".join(name for name, _ in made.ingredients)
        title, domain, answer = capital(made.title), "cooking", recipes.about(rng, made)
    else:
        job = rng.choice(PROJECTS)
        needs = ", ".join(rng.choice((job.materials, job.tools, (*job.tools, *job.materials))))
        title, domain, answer = capital(job.title), rng.choice(("DIY", "diy")), diy.about(rng, job)
    context = form(
        rng, ("title", title), ("domain", sometimes(rng, domain, 0.3)), ("ingredients", sometimes(rng, needs, 0.7))
    )
    return Exchange(request, answer, context)


SOURCES = (Source(step_summary, 3), Source(text_summary, 2), Source(task_description, 2))
