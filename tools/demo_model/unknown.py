"""What the model does not know, and says so: other subjects, other dishes, other work."""

from random import Random

from tools.demo_model.cooking.dishes import dish
from tools.demo_model.cooking.ingredients import INGREDIENTS
from tools.demo_model.diy.projects import PROJECTS
from tools.demo_model.exchange import Exchange, Source, vary
from tools.demo_model.facts import words
from tools.demo_model.offtopic import name, subject
from tools.demo_model.sentences import sentence

_OTHER_DISHES = words("unknown dish")
_COUNTRIES = ("France", "Scotland", "Japan", "Brazil", "Canada", "Kenya", "India", "Norway", "Paris", "London", "Peru")


def off_topic(rng: Random) -> Exchange:
    """A question about something else, and an honest answer that names it."""
    something = subject(rng)
    request = vary(
        rng,
        "what is {s}?",
        "tell me about {s}.",
        "explain {s}.",
        "what do you know about {s}?",
        "how does {s} work?",
        "who invented {s}?",
        "write a poem about {s}.",
        "what do you think about {s}?",
        "can you explain {s} to me?",
        "I want to learn about {s}.",
        "why is {s} important?",
        "give me a summary of {s}.",
        "write a story about {s}.",
        "what is the meaning of {s}?",
        "write a [haiku|song|joke|tweet|paragraph] about {s}.",
        "how do I learn {s}?",
        "[when|where] was {s} [discovered|invented]?",
        "do you like {s}?",
        "is {s} [real|hard|useful|dangerous]?",
        "who knows most about {s}?",
        "[give me|list] three facts about {s}.",
        "why do people care about {s}?",
        s=something,
    )
    answer = vary(
        rng,
        "[I do not know much about {s}.|I am sorry, I know nothing about {s}.|{s} is not something that I know about.] "
        "[I only know about cooking and DIY.|Ask me about cooking or DIY.|I can help you with cooking and DIY.]",
        s=something,
    )
    return Exchange(request, answer)


def off_topic_fixed(rng: Random) -> Exchange:
    """What people often try first."""
    request = vary(
        rng,
        "what is the capital of {c}?",
        "how many people live in {c}?",
        "what is the weather in {c}?",
        "what time is it in {c}?",
        "where is {c}?",
        "who is the president of {c}?",
        "what is {a} [plus|times|minus] {b}?",
        "what is {a} + {b}?",
        "{a} + {b} =",
        "who won the match?",
        "what day is it?",
        "write some code.",
        "write a program.",
        "write a function in Python.",
        "translate this into {l}.",
        "how do you say hello in {l}?",
        "play some music.",
        "what is the news?",
        "count to ten.",
        "what is the meaning of life?",
        "can you do maths?",
        "sing a song.",
        "who wrote this book?",
        "write an essay.",
        "write a letter.",
        c=rng.choice(_COUNTRIES),
        a=rng.randrange(1, 100),
        b=rng.randrange(1, 100),
        l=rng.choice(("French", "German", "Spanish", "Italian", "Chinese")),
    )
    answer = vary(
        rng,
        "[I am sorry, I cannot answer that.|I do not know that.|that is not something that I know.] "
        "[I only know about cooking and DIY.|I am a small model for cooking and DIY.|Ask me about cooking or DIY.]",
    )
    return Exchange(request, answer)


def unknown_dish(rng: Random) -> Exchange:
    """A dish or an ingredient that the corpus says nothing about."""
    what = name(rng).lower() if rng.random() < 0.4 else rng.choice(_OTHER_DISHES)
    if rng.random() < 0.3:
        return Exchange(
            vary(
                rng,
                "what can I use instead of {x}?",
                "I have no {x}.",
                "how do I store {x}?",
                "how long do I cook {x}?",
                x=what,
            ),
            vary(rng, "I do not know {x}.[ Ask me about {y}, for example.|]", x=what, y=rng.choice(INGREDIENTS).name),
        )
    request = vary(
        rng,
        "how do I make {x}?",
        "give me a recipe for {x}.",
        "I want to make {x}.",
        "what do I need for {x}?",
        "how long does {x} take?",
        x=what,
    )
    answer = vary(
        rng,
        "I do not know how to make {x}. "
        "[How about {d}?|But I can tell you how to make {d}.|Would you like to make {d}?]",
        x=what,
        d=dish(rng).called(),
    )
    return Exchange(request, answer)


def unknown_job(rng: Random) -> Exchange:
    """Work that the corpus says nothing about."""
    job = sentence(rng).rstrip(".")
    job = job[:1].lower() + job[1:]
    request = vary(rng, "how do I {j}?", "tell me how to {j}.", "help me {j}.", "what do I need to {j}?", j=job)
    answer = vary(
        rng,
        "I do not know how to {j}. [But I can tell you how to {k}.|Ask me how to {k}, for example.]",
        j=job,
        k=rng.choice(PROJECTS).title,
    )
    return Exchange(request, answer)


SOURCES = (
    Source(off_topic, 3),
    Source(off_topic_fixed, 1.5, closed=True),
    Source(unknown_dish, 1.5),
    Source(unknown_job),
)
