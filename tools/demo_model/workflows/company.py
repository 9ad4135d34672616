"""What keeps a person company during a task: questions, small talk, tips and jokes."""

from random import Random

from tools.demo_model.cooking.dishes import dish
from tools.demo_model.diy.projects import PROJECTS
from tools.demo_model.exchange import Exchange, Source, agreement, article, capital, vary
from tools.demo_model.smalltalk import JOKES
from tools.demo_model.workflows.task import form, sometimes, task

_REPLY = (
    "Reply to the user in a friendly way, in one or two short sentences. You are a voice assistant that helps people "
    "to cook and to do things around the house. Do not start a new task, and do not invent facts about the current one."
)
_ASK = (
    "Ask the user one short question that fits the current step: about how the work goes, or about what has been made "
    "so far. It must be easy to answer, and must not ask for what the steps already say."
)
_TALK = (
    ("[I love this!|this is fun.|it looks great.]", "I am glad to hear that. [Let us go on.|Shall we go on?]"),
    ("[this is hard.|I am tired.|I need a break.]", "take your time. [We can go on when you are ready.|]"),
    ("[my family will love it.|my friends are coming.]", "that sounds lovely. I hope that you enjoy it."),
    ("[is this difficult?|can I do this?]", "[you are doing well.|do not worry.] We go step by step."),
    ("[what are we doing?|what is this?|what is the task?]", "[we are working on this: {t}.|this is: {t}.]"),
    ("[thank you.|thanks for the help.]", "you are welcome! [Is there anything else?|]"),
    ("[hello.|hi!|how are you?]", "hello! [Are you ready to go on?|I am well, thank you.]"),
    ("[tell me a joke.|make me laugh.|say something funny.]", "{j}"),
    (
        "[I am bored.|this takes long.|how much longer?]",
        "we are getting there. [Step by step!|Shall I tell you a joke?]",
    ),
    (
        "[can I have a drink?|I need some water.|one moment.|wait.]",
        "of course. [I am here when you need me.|Take your time.]",
    ),
    (
        "[I spilled it.|I made a mistake.|it went wrong.|oh no.]",
        "[do not worry|never mind], that happens to everybody.",
    ),
)


def proactive_question(rng: Random) -> Exchange:
    """A question that keeps the talk going while a person works on a step."""
    if rng.random() < 0.5:
        made = dish(rng)
        title, steps, main = capital(made.title), made.steps, rng.choice(made.mains)
        answer = vary(
            rng,
            "would you like to know what else goes well with {x}?",
            "do you often cook with {x}?",
            "how {do} the {x} look[ so far| now|]?",
            "[is everything going well|how is it going] with the {x}?",
            "shall I tell you how to store the rest of the {x}?",
            "have you made {d} before?",
            x=main.name,
            d=made.called(),
            **agreement(main.name),
        )
    else:
        job = rng.choice(PROJECTS)
        title, steps = capital(job.title), job.steps
        answer = vary(
            rng,
            "do you have {t} at hand?",
            "how is the work going so far?",
            "did this step go well?",
            "would you like to know what {t} is for?",
            "is this the first time that you {j}?",
            "shall I tell you what to be careful about?",
            t=article(rng.choice(job.tools)),
            j=job.title,
        )
    index = rng.randrange(len(steps))
    request = vary(
        rng,
        "ask the user a question about the [current step|task].",
        "write a [short |]question that keeps the conversation going.",
        "ask [a|one] question that fits the [current |]step.",
        "what could the assistant ask [now|the user]?",
        "[write|ask] a [friendly|proactive] question [about the step|for the user].",
    )
    request = _ASK if rng.random() < 0.4 else request
    before = sometimes(rng, " ".join(steps[max(0, index - 2) : index]), 0.6)
    return Exchange(request, answer, form(rng, ("title", title), ("before", before), ("step", steps[index])))


def guided_talk(rng: Random) -> Exchange:
    """Small talk in the middle of a task."""
    work = task(rng)
    said, answer = rng.choice(_TALK)
    request = vary(
        rng,
        "reply to the user.",
        "answer the user in a friendly way.",
        "continue the conversation.",
        "write the assistant's [reply|answer|next turn].",
        "answer the user[ briefly| in one sentence|].",
    )
    request = _REPLY if rng.random() < 0.5 else request
    context = form(
        rng,
        ("title", work.title if "{t}" in answer else sometimes(rng, work.title, 0.8)),
        ("user", sometimes(rng, vary(rng, "next.", "go on.", "start.", "what is next?"), 0.3)),
        ("assistant", sometimes(rng, rng.choice(work.steps), 0.7)),
        ("wants", sometimes(rng, vary(rng, "chit chat", "small talk"), 0.2)),
        ("user", vary(rng, said)),
    )
    return Exchange(request, vary(rng, answer, t=work.title.lower(), j=rng.choice(JOKES)).strip(), context)


def extra(rng: Random) -> Exchange:
    """A tip, a warning, a joke or an explanation for a task."""
    if rng.random() < 0.5:
        job = rng.choice(PROJECTS)
        title, warning = job.title, job.caution
        tip = f"Put {article(rng.choice(job.tools))} within reach before you start."
    else:
        made = dish(rng)
        title, main = made.title, rng.choice(made.mains)
        warning = "The pan is hot, so mind your fingers."
        tip = vary(rng, "{x} {goes} well with {p}.", x=main.name, p=main.pairs[0], **agreement(main.name))
    kind, answer = rng.choice((("tip", tip), ("warning", warning), ("joke", rng.choice(JOKES))))
    request = vary(
        rng, "give the user a {k}.", "write a {k} for this task.", "write [one|a short] {k}.", "add a {k}.", k=kind
    )
    return Exchange(request, answer, form(rng, ("title", capital(title))))


SOURCES = (Source(proactive_question, 2), Source(guided_talk, 1.5), Source(extra))
