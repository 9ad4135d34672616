"""Requests for dishes, and questions about a recipe that is at hand."""

from random import Random

from tools.demo_model.cooking.dishes import Dish, dish
from tools.demo_model.cooking.ingredients import INGREDIENTS
from tools.demo_model.cooking.questions import duration
from tools.demo_model.exchange import Exchange, Source, agreement, listing, measured, numbered, vary


def recipe(rng: Random) -> Exchange:
    made = dish(rng)
    request = vary(
        rng,
        "how do I make {d}?",
        "how do I cook {d}?",
        "give me a recipe for {d}.",
        "I want to make {d}.",
        "can you help me make {d}?",
        "write a recipe for {d}.",
        "{d} recipe, please.",
        "what is the recipe for {d}?",
        "show me how to make {d}.",
        d=made.called(),
    )
    return Exchange(request, instructions(rng, made))


def instructions(rng: Random, made: Dish) -> str:
    """A recipe in words: numbered, or as one paragraph."""
    if rng.random() < 0.6:
        return vary(
            rng,
            "[here is how to make {d}:|to make {d}:|{d} for four people:]\n{s}",
            d=made.called(),
            s=numbered(made.steps),
        )
    return " ".join(made.steps)


def shopping(rng: Random) -> Exchange:
    made = dish(rng)
    request = vary(
        rng,
        "what do I need for {d}?",
        "which ingredients do I need for {d}?",
        "what goes into {d}?",
        "list the ingredients of {d}.",
        "write a shopping list for {d}.",
        d=made.called(),
    )
    if rng.random() < 0.5:
        answer = vary(rng, "for {d} you need {l}.", d=made.called(), l=listing([name for name, _ in made.ingredients]))
    else:
        answer = vary(rng, "you need:\n{l}", l="\n".join(f"- {name}: {amount}" for name, amount in made.ingredients))
    return Exchange(request, answer)


def dish_time(rng: Random) -> Exchange:
    made = dish(rng)
    request = vary(
        rng,
        "how long does it take to make {d}?",
        "how long {do} {d} take?",
        "how much time do I need for {d}?",
        d=made.called(),
        **agreement(made.title),
    )
    answer = vary(rng, "{d} {takes} about {t}.", d=made.called(), t=duration(made.minutes), **agreement(made.title))
    return Exchange(request, answer)


def idea(rng: Random) -> Exchange:
    made = dish(rng)
    names = [main.name for main in made.mains][: rng.choice((1, 2))]
    request = vary(
        rng,
        "what can I [make|cook] with {x}?",
        "I have {x}. What can I [make|cook]?",
        "suggest a dish with {x}.",
        "what should I cook with {x} [tonight|today]?",
        "give me an idea for {x}.",
        "I have some {x} left over.",
        x=listing(names),
    )
    answer = vary(
        rng,
        "[you could make {d}.|how about {d}?|try {d}.|I suggest {d}.] [{It} {be} {t}, and {it} {takes} about {m}."
        "|{It} {takes} about {m}.|{It} {be} {t}.]",
        d=made.called(),
        t=made.taste,
        m=duration(made.minutes),
        **agreement(made.title),
    )
    return Exchange(request, answer)


def meal_idea(rng: Random) -> Exchange:
    made = dish(rng)
    request = vary(
        rng,
        "what should I [cook|make|eat] for {m}?",
        "suggest something for {m}.",
        "I need an idea for {m}.",
        "what is a good {m}?",
        "what can I have for {m}?",
        "I am hungry.",
        "help me decide on {m}.",
        m=made.meal,
    )
    answer = vary(
        rng,
        "[how about {d}?|you could make {d}.|I suggest {d}.] {It} {takes} about {t}.",
        d=made.called(),
        t=duration(made.minutes),
        **agreement(made.title),
    )
    return Exchange(request, answer)


def taste(rng: Random) -> Exchange:
    made = dish(rng)
    request = vary(
        rng,
        "what {be} {d} like?",
        "describe {d}.",
        "tell me about {d}.",
        "{be} {d} any good?",
        d=made.called(),
        **agreement(made.title),
    )
    return Exchange(request, about(rng, made))


def about(rng: Random, made: Dish) -> str:
    """Two sentences that describe a dish."""
    return vary(
        rng,
        "{d} {be} {t}. {It} {be} made with {i}[ and ready in about {m}|].",
        d=made.called(),
        t=made.taste,
        i=listing([main.name for main in made.mains]),
        m=duration(made.minutes),
        **agreement(made.title),
    )


def has_ingredient(rng: Random) -> Exchange:
    made = dish(rng)
    names = [name for name, _ in made.ingredients]
    if inside := rng.random() < 0.5:
        name = rng.choice(names)
    else:
        name = rng.choice([x.name for x in INGREDIENTS if x.name not in names])
    request = vary(
        rng, "do I need {x}?", "is there {x} in it?", "does it contain {x}?", "do I have to buy {x}?", x=name
    )
    answer = vary(
        rng,
        "[yes, you need {x}.|yes, the {f} contains {x}.]"
        if inside
        else "[no, you do not need {x}.|no, there is no {x} in the {f}.]",
        x=name,
        f=made.title,
    )
    return Exchange(request, answer, vary(rng, "[Ingredients of {d}|{d}]: {l}", d=made.title, l=", ".join(names)))


def amount(rng: Random) -> Exchange:
    made = dish(rng)
    name, quantity = rng.choice(made.ingredients)
    request = vary(
        rng, "how {much} {x} do I need?", "what amount of {x}?", "how {much} {x} {goes} in?", x=name, **agreement(name)
    )
    context = vary(
        rng, "[Ingredients of {d}|{d}]: {l}", d=made.title, l=", ".join(measured(a, n) for n, a in made.ingredients)
    )
    return Exchange(request, vary(rng, "[you need|the recipe uses] {a}.", a=measured(quantity, name)), context)


def article_text(rng: Random) -> str:
    """A recipe as a page of a book would print it."""
    made = dish(rng)
    return vary(
        rng,
        "{d}\n\n{a}\n\nIngredients:\n{l}\n\n[Steps|Method]:\n{s}",
        d=made.title,
        a=about(rng, made),
        l="\n".join(f"- {name}: {quantity}" for name, quantity in made.ingredients),
        s=numbered(made.steps),
    )


SOURCES = (
    Source(recipe, 4),
    Source(shopping, 1.5),
    Source(dish_time),
    Source(idea, 2),
    Source(meal_idea),
    Source(taste),
    Source(has_ingredient),
    Source(amount),
)
