"""What an assistant that guides a person through a task asks of a model: summaries, JSON, decisions."""

import json
from random import Random

from tools.demo_model.cooking import recipes
from tools.demo_model.cooking.dishes import dish
from tools.demo_model.cooking.ingredients import BY_NAME, INGREDIENTS, SWAP_AMOUNT
from tools.demo_model.cooking.questions import description
from tools.demo_model.diy import questions as diy
from tools.demo_model.diy.projects import PROJECTS
from tools.demo_model.exchange import Exchange, Source, article, capital, listing, measured, vary
from tools.demo_model.offtopic import subject

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
)


def _task(rng: Random) -> tuple[str, tuple[str, ...]]:
    """A title and its steps, from the kitchen or the workshop."""
    if rng.random() < 0.5:
        made = dish(rng)
        return capital(made.title), made.steps
    job = rng.choice(PROJECTS)
    return capital(job.title), job.steps


def _decapital(text: str) -> str:
    return text[:1].lower() + text[1:]


def summary(rng: Random) -> Exchange:
    """A text that is longer than it needs to be, and what is left when the padding goes."""
    sort = rng.random()
    if sort < 0.6:
        title, steps = _task(rng)
        start = rng.randrange(len(steps) - 1)
        kept = steps[start : start + rng.choice((1, 2))]
        text = " ".join(f"{step} {rng.choice(_ASIDES)}" if rng.random() < 0.7 else step for step in kept)
        answer = (
            " ".join(kept)
            if rng.random() < 0.5
            else f"{', then '.join([kept[0].rstrip('.'), *map(_decapital, kept[1:])])}"
        )
        answer = answer if answer.endswith(".") else answer + "."
        context = vary(rng, "Title: {t}\nStep: {x}", "Task: {t}\nStep: {x}", "{x}", "{x}", t=title, x=text)
    elif sort < 0.8:
        thing = rng.choice(INGREDIENTS)
        first = description(rng, thing)
        context = f"{first} {rng.choice(_ASIDES)}"
        answer = first.split(". ")[0].rstrip(".") + "."
    else:
        something = subject(rng)
        remarks = [vary(rng, remark, s=something) for remark in rng.sample(_REMARKS, rng.choice((2, 3)))]
        context, answer = " ".join(remarks), remarks[0]
    return _with_input(
        rng,
        "[summarise the following step.|summarise the text.|summarize the input.|write a short summary."
        "|give a summary of this.|shorten this text.|summarise the step in one sentence.|summarize this."
        "|what does this say in short?"
        "|write a short summary of the step for somebody who listens.]",
        "[summarise|summarize|summary|in short]",
        answer,
        context,
    )


def _with_input(rng: Random, request: str, short: str, answer: str, context: str) -> Exchange:
    """The request with its input apart, or both in one line after a colon."""
    if rng.random() < 0.3:
        return Exchange(f"{vary(rng, short)}: {context}", answer)
    return Exchange(vary(rng, request), answer, context)


def task_description(rng: Random) -> Exchange:
    request = vary(
        rng,
        "write a short description of the task.",
        "describe this task.",
        "write an appealing description of this recipe or project.",
        "describe the task in two sentences.",
        "write a description for the title.",
    )
    if rng.random() < 0.6:
        made = dish(rng)
        names = [name for name, _ in made.ingredients]
        context = vary(
            rng,
            "[Title|Task|Recipe]: {t}\n[Ingredients: {i}|Domain: cooking\nIngredients: {i}]",
            t=capital(made.title),
            i=", ".join(names),
        )
        return Exchange(request, recipes.about(rng, made), context)
    job = rng.choice(PROJECTS)
    context = vary(
        rng,
        "[Title|Task|Project]: {t}[\nMaterials: {i}|\nDomain: DIY|]",
        t=capital(job.title),
        i=", ".join(job.materials),
    )
    return Exchange(request, diy.about(rng, job), context)


def replacement_json(rng: Random) -> Exchange:
    """A substitute with its amount, as JSON with the keys `name` and `amount`."""
    made = dish(rng)
    known = [(name, amount) for name, amount in made.ingredients if name in BY_NAME]
    name, usual = rng.choice(known)
    new, amount, new_amount = BY_NAME[name].swap, usual, SWAP_AMOUNT.get(name)
    if new_amount is None:
        new_amount = amount = _other_amount(rng, usual)
    request = vary(
        rng,
        "find a replacement for the ingredient and answer in JSON.",
        "replace the ingredient. Answer with JSON that has the keys name and amount.",
        "suggest a replacement for {x} as JSON with name and amount.",
        'which ingredient replaces {x}? Reply in JSON: {{"name": "...", "amount": "..."}}',
        x=name,
    )
    context = vary(
        rng,
        "[Recipe: {t}\n|Task: {t}\n|]Ingredient: [{x}, {a}|{x} ({a})|{m}|{x}\nAmount: {a}]"
        "[\nUser: I [have no|do not have|don't like|cannot eat] {x}.|]",
        t=capital(made.title),
        x=name,
        a=amount,
        m=measured(amount, name),
    )
    return Exchange(request, json.dumps({"name": new, "amount": new_amount}), context)


def _other_amount(rng: Random, usual: str) -> str:
    """An amount in the same unit for another number of people: the substitute's amount is copied, not known."""
    number, _, unit = usual.partition(" ")
    if not number.isdigit():
        return usual
    count = rng.randrange(10, 1000, 5) if unit in ("g", "ml") else rng.randint(2, 12)
    return f"{count} {unit}".strip() if not unit or unit.endswith(("s", "g", "ml")) else usual


def step_rewrite(rng: Random) -> Exchange:
    """A step in which one ingredient is replaced by another."""
    while True:
        made = dish(rng)
        name = rng.choice([main.name for main in made.mains])
        steps = [step for step in made.steps if name in step]
        if steps:
            break
    step = rng.choice(steps)
    new = rng.choice([BY_NAME[name].swap, rng.choice(INGREDIENTS).name])
    request = vary(
        rng,
        "rewrite the step with the new ingredient.",
        "replace the ingredient in the step.",
        "rewrite the step so that it uses {y} instead of {x}.",
        "change the step: use {y} instead of {x}.",
        x=name,
        y=new,
    )
    context = vary(
        rng,
        "Step: {s}\nReplace {x} with {y}.",
        "Step: {s}\nOld: {x}\nNew: {y}",
        "{s}\nUse {y} instead of {x}.",
        s=step,
        x=name,
        y=new,
    )
    return Exchange(request, step.replace(name, new), context)


def proactive_question(rng: Random) -> Exchange:
    """A question that keeps the talk going while a person works on a step."""
    if rng.random() < 0.5:
        made = dish(rng)
        index = rng.randrange(len(made.steps))
        title, steps = capital(made.title), made.steps
        main = rng.choice(made.mains)
        answer = vary(
            rng,
            "would you like to know what else goes well with {x}?",
            "do you often cook with {x}?",
            "shall I tell you how to store the rest of the {x}?",
            "have you made {d} before?",
            x=main.name,
            d=made.title,
        )
    else:
        job = rng.choice(PROJECTS)
        index = rng.randrange(len(job.steps))
        title, steps = capital(job.title), job.steps
        answer = vary(
            rng,
            "do you have {t} at hand?",
            "would you like to know what {t} is for?",
            "is this the first time that you {j}?",
            "shall I tell you what to be careful about?",
            t=article(rng.choice(job.tools)),
            j=job.title,
        )
    request = vary(
        rng,
        "ask the user a question about the current step.",
        "write a question that keeps the conversation going.",
        "ask a question that fits the step.",
        "what could the assistant ask now?",
    )
    before = f"Previous steps: {' '.join(steps[:index])}\n" if index and rng.random() < 0.6 else ""
    return Exchange(request, answer, f"Task: {title}\n{before}Current step: {steps[index]}")


_DECISIONS = (
    ("next", "[next|go on|what is next?|next step, please|I am done|continue|what do I do now?]"),
    ("previous", "[go back|previous step|what was the last step?|back, please]"),
    ("repeat", "[repeat that|say that again|what did you say?|once more, please]"),
    ("start", "[let's start|start|begin|I am ready|start cooking]"),
    ("stop", "[stop|quit|exit|cancel|goodbye]"),
    ("ingredients", "[what do I need?|which ingredients do I need?|list the ingredients|what tools do I need?]"),
    ("search", "[I want to make {d}|search for {d}|find me {d}|something with {x}|do you have {d}?]"),
    ("replace", "[what can I use instead of {x}?|I have no {x}|replace the {x}|I don't like {x}]"),
    ("question", "[how long does it take?|how hot should it be?|why do I do that?|how do I do that?|is it done?]"),
    ("chit_chat", "[hello|how are you?|tell me a joke|thank you|you are funny]"),
)


def decision(rng: Random) -> Exchange:
    """Which of the assistant's functions an utterance asks for."""
    name, utterances = rng.choice(_DECISIONS)
    made = dish(rng)
    said = vary(rng, utterances, d=made.title, x=made.mains[0].name)
    title, steps = _task(rng)
    options = ", ".join(option for option, _ in _DECISIONS)
    request = vary(
        rng,
        "[choose the intent of the user.|classify what the user wants.|which intent does the user have?] "
        "[Answer with one of: {o}.|The intents are: {o}.]",
        o=options,
    )
    context = vary(rng, "[Task: {t}\n|][Assistant: {s}\n|]User: {u}", t=title, s=rng.choice(steps), u=said)
    return Exchange(request, name, context)


def guided_talk(rng: Random) -> Exchange:
    """Small talk in the middle of a task."""
    title, steps = _task(rng)
    said, answer = rng.choice(
        (
            ("[I love this!|this is fun.|it looks great.]", "I am glad to hear that. [Let us go on.|Shall we go on?]"),
            ("[this is hard.|I am tired.|I need a break.]", "take your time. [We can go on when you are ready.|]"),
            ("[my family will love it.|my friends are coming.]", "that sounds lovely. I hope that you enjoy it."),
            ("[is this difficult?|can I do this?]", "[you are doing well.|do not worry.] We go step by step."),
            ("[what are we making?|what is this?|what is the task?]", "[we are working on: {t}.|this is: {t}.]"),
            ("[thank you.|thanks for the help.]", "you are welcome! [Is there anything else?|]"),
        )
    )
    request = vary(rng, "reply to the user.", "answer the user in a friendly way.", "continue the conversation.")
    context = vary(rng, "Task: {t}\nAssistant: {s}\nUser: {u}", t=title, s=rng.choice(steps), u=vary(rng, said))
    return Exchange(request, vary(rng, answer, t=_decapital(title)).strip(), context)


def structured(rng: Random) -> Exchange:
    """A recipe, a project or an ingredient as a JSON object."""
    sort = rng.randrange(3)
    if sort == 0:
        made = dish(rng)
        record: dict[str, object] = {"title": made.title, "minutes": made.minutes, "meal": made.meal}
        if rng.random() < 0.5:
            record["ingredients"] = [name for name, _ in made.ingredients]
        subject = made.title
    elif sort == 1:
        job = rng.choice(PROJECTS)
        record = {"title": job.title, "minutes": job.minutes, "tools": list(job.tools), "easy": job.level == "easy"}
        subject = f"how to {job.title}"
    else:
        thing = rng.choice(INGREDIENTS)
        record = {"name": thing.name, "kind": thing.kind, "amount": thing.amount, "pairs": list(thing.pairs)}
        subject = thing.name
    request = vary(
        rng,
        "[describe {s} as JSON.|give me {s} as a JSON object.|write a JSON object about {s}.] "
        "[Use the keys {k}.|The keys are {k}.]",
        s=subject,
        k=listing(list(record)),
    )
    return Exchange(request, json.dumps(record))


def extra(rng: Random) -> Exchange:
    """A tip, a warning or an explanation for a task."""
    if rng.random() < 0.5:
        job = rng.choice(PROJECTS)
        title, warning = job.title, job.caution
        tip = f"A {rng.choice(('good ladder', 'clean cloth', 'sharp pencil', 'friend'))} helps with this job."
    else:
        made = dish(rng)
        title = made.title
        main = rng.choice(made.mains)
        warning = "The pan is hot, so mind your fingers."
        tip = f"{capital(main.name)} {'go' if main.name.endswith('s') else 'goes'} well with {main.pairs[0]}."
    kind, answer = rng.choice((("tip", tip), ("warning", warning)))
    return Exchange(
        vary(rng, "give the user a {k}.", "write a {k} for this task.", "write one {k}.", k=kind),
        answer,
        vary(rng, "[Task|Title]: {t}", t=capital(title)),
    )


SOURCES = (
    Source(summary, 4),
    Source(task_description, 2),
    Source(replacement_json, 3),
    Source(step_rewrite, 1.5),
    Source(proactive_question, 2),
    Source(decision, 2),
    Source(guided_talk),
    Source(structured, 1.5),
    Source(extra),
)
