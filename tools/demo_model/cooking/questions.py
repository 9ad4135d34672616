"""Questions about ingredients, and their answers."""

from random import Random

from tools.demo_model.cooking.ingredients import (
    COOKED,
    FREEZES,
    INGREDIENTS,
    KIND_NOUN,
    STORAGE,
    SWAP_AMOUNT,
    Ingredient,
)
from tools.demo_model.exchange import Exchange, Source, agreement, listing, measured, vary

_CUPS = {
    "flour": 125,
    "sugar": 200,
    "rice": 185,
    "oats": 90,
    "butter": 225,
    "honey": 340,
    "breadcrumbs": 110,
    "lentils": 190,
    "cheese": 115,
    "almonds": 145,
}
_MILLILITRES = {"cup": 240, "tablespoon": 15, "teaspoon": 5, "pint": 570}
_CELSIUS = {300: 150, 325: 165, 350: 180, 375: 190, 400: 200, 425: 220, 450: 230}


def swap(rng: Random) -> Exchange:
    thing = rng.choice(INGREDIENTS)
    request = vary(
        rng,
        "what can I use instead of {x}?",
        "can I replace the {x} with something else?",
        "what is a good substitute for {x}?",
        "I have no {x}. What [can|should] I use?",
        "I don't have any {x}.",
        "I am out of {x}, what now?",
        "can I cook this without {x}?",
        "replace {x}.",
        "how do I replace {x}?",
        x=thing.name,
    )
    answer = vary(
        rng,
        "[you can use {y} instead of {x}.|{y} {works} well instead of {x}.|try {y} in place of {x}.]"
        "[ {a}| The taste will change a little.|]",
        x=thing.name,
        y=thing.swap,
        a=_swap_amount(thing),
        **agreement(thing.swap),
    )
    return Exchange(request, answer)


def swap_allowed(rng: Random) -> Exchange:
    thing = rng.choice(INGREDIENTS)
    good = rng.random() < 0.5
    other = thing.swap if good else rng.choice([x.name for x in INGREDIENTS if x.kind != thing.kind])
    request = vary(
        rng,
        "can I use {y} instead of {x}?",
        "can I replace {x} with {y}?",
        "is {y} a good substitute for {x}?",
        "would {y} work instead of {x}?",
        x=thing.name,
        y=other,
    )
    if good:
        answer = vary(rng, "yes, you can use {y} instead of {x}.[ {a}|]", x=thing.name, y=other, a=_swap_amount(thing))
    else:
        answer = vary(
            rng,
            "no, {y} {be} too different from {x}. Use {z} instead.",
            x=thing.name,
            y=other,
            z=thing.swap,
            **agreement(other),
        )
    return Exchange(request, answer)


def _swap_amount(thing: Ingredient) -> str:
    if thing.name in SWAP_AMOUNT:
        return f"Use {SWAP_AMOUNT[thing.name]} in place of {measured(thing.amount, thing.name)}."
    return "Use about the same amount."


def cooking_time(rng: Random) -> Exchange:
    thing = rng.choice(COOKED)
    request = vary(
        rng,
        "how long do I {m} {x}?",
        "how long should I {m} {x}?",
        "how many minutes {do} {x} need?",
        "how long does it take to {m} {x}?",
        "how do I {m} {x}?",
        "how do I cook {x}?",
        "what is the best way to cook {x}?",
        "when {be} {x} done?",
        "for how long should I {m} {x}?",
        x=thing.name,
        m=thing.method,
        **agreement(thing.name),
    )
    answer = vary(
        rng,
        "{m} {x} for about {t}, until {s}.",
        "{m} {x} for {t}.[ The sign to look for: {s}.| It is time to stop when {s}.]",
        "first {p}. Then {m} {them} for about {t}, until {s}.",
        x=f"the {thing.name}",
        m=thing.method,
        t=duration(thing.minutes),
        s=thing.sign,
        p=thing.preparation(),
        **agreement(thing.name),
    )
    return Exchange(request, answer)


def preparation(rng: Random) -> Exchange:
    thing = rng.choice(INGREDIENTS)
    request = vary(
        rng,
        "how do I prepare {x}?",
        "what do I do with the {x} first?",
        "how should I prepare {x}?",
        "how do I get {x} ready?",
        x=thing.name,
    )
    answer = vary(
        rng,
        "[{p}[ first| before you cook {them}|].|for most dishes, {p}.][ You need about {a} for four people.|]",
        p=thing.preparation(),
        a=thing.amount,
        **agreement(thing.name),
    )
    return Exchange(request, answer)


def storage(rng: Random) -> Exchange:
    thing = rng.choice(INGREDIENTS)
    place, time = STORAGE[thing.kind]
    request = vary(
        rng,
        "how do I store {x}?",
        "how should I keep {x}?",
        "where do I keep {x}?",
        "how long {do} {x} keep?",
        "how do I keep {x} fresh?",
        "what is the best way to store {x}?",
        x=thing.name,
        **agreement(thing.name),
    )
    answer = vary(
        rng,
        "[keep {x} {w}.|store {x} {w}.|{x} {keeps} best {w}.] [{It} will last {t}.|{It} {keeps} for {t}.]",
        x=thing.name,
        w=place,
        t=time,
        **agreement(thing.name),
    )
    return Exchange(request, answer)


def freezing(rng: Random) -> Exchange:
    thing = rng.choice(INGREDIENTS)
    request = vary(
        rng,
        "can I freeze {x}?",
        "is it all right to freeze {x}?",
        "{do} {x} freeze well?",
        x=thing.name,
        **agreement(thing.name),
    )
    template = (
        "yes, you can freeze {x}.[ Use a closed box and write the date on it.| Cool {them} first.|]"
        if FREEZES[thing.kind]
        else "no, it is better not to freeze {x}. Keep {them} {w} instead."
    )
    answer = vary(rng, template, x=thing.name, w=STORAGE[thing.kind][0], **agreement(thing.name))
    return Exchange(request, answer)


def pairing(rng: Random) -> Exchange:
    thing = rng.choice(INGREDIENTS)
    request = vary(
        rng,
        "what goes well with {x}?",
        "what can I serve with {x}?",
        "what tastes good with {x}?",
        "which flavours suit {x}?",
        x=thing.name,
    )
    answer = vary(
        rng,
        "{x} {goes} well with {p}.",
        "try {x} with {p}.",
        "{p} all go well with {x}.",
        x=thing.name,
        p=listing(thing.pairs),
        **agreement(thing.name),
    )
    return Exchange(request, answer)


def nature(rng: Random) -> Exchange:
    thing = rng.choice(INGREDIENTS)
    request = vary(
        rng,
        "what {be} {x}?",
        "tell me about {x}.",
        "what do you know about {x}?",
        "describe {x}.",
        "explain what {x} {be}.",
        "write a sentence about {x}.",
        "give me some information about {x}.",
        x=thing.name,
        **agreement(thing.name),
    )
    return Exchange(request, description(rng, thing))


def description(rng: Random, thing: Ingredient) -> str:
    """Two sentences about an ingredient."""
    place, _ = STORAGE[thing.kind]
    return vary(
        rng,
        "{x} {be} {k}[ that goes well with {p}.|. {It} {goes} well with {p}.][ Keep {them} {w}."
        "| If you have none, use {s}.|]",
        x=thing.name,
        k=KIND_NOUN[thing.kind],
        p=listing(thing.pairs),
        w=place,
        s=thing.swap,
        **agreement(thing.name),
    )


def article_text(rng: Random) -> str:
    """A paragraph about some ingredients."""
    return " ".join(description(rng, thing) for thing in rng.sample(INGREDIENTS, rng.randint(2, 4)))


def is_a(rng: Random) -> Exchange:
    thing = rng.choice(INGREDIENTS)
    truth = rng.random() < 0.5
    kind = thing.kind if truth else rng.choice([kind for kind in KIND_NOUN if kind != thing.kind])
    forms = agreement(thing.name)
    request = vary(rng, "{be} {x} {k}?", x=thing.name, k=KIND_NOUN[kind], **forms)
    template = "yes, {x} {be} {k}." if truth else "no, {x} {be} {r}."
    return Exchange(request, vary(rng, template, x=thing.name, k=KIND_NOUN[kind], r=KIND_NOUN[thing.kind], **forms))


def examples(rng: Random) -> Exchange:
    kind = rng.choice(("vegetable", "fruit", "herb", "spice", "grain", "nut", "fish", "meat"))
    many = {"fish": "kinds of seafood", "grain": "grain products"}.get(kind, f"{kind}s")
    count, word = rng.choice(((2, "two"), (3, "three"), (4, "four")))
    if kind == "nut":
        count, word = 2, "two"
    names = rng.sample([x.name for x in INGREDIENTS if x.kind == kind], count)
    request = vary(rng, "[name|list|give me|tell me] {n} {k}.", n=word, k=many)
    return Exchange(request, vary(rng, "{n} {k} are {l}.", n=word, k=many, l=listing(names)))


def measures(rng: Random) -> Exchange:
    sort = rng.randrange(3)
    if sort == 0:
        name, grams = rng.choice(list(_CUPS.items()))
        count = rng.choice((1, 2, 3))
        request = vary(
            rng,
            "how many grams are in {c} of {x}?",
            "how much does {c} of {x} weigh?",
            "convert {c} of {x} to grams.",
            c=_count(count, "cup"),
            x=name,
        )
        return Exchange(
            request,
            vary(
                rng,
                "{c} of {x} {w} about {g} g.",
                c=_count(count, "cup"),
                x=name,
                w="weighs" if count == 1 else "weigh",
                g=grams * count,
            ),
        )
    if sort == 1:
        unit, size = rng.choice(list(_MILLILITRES.items()))
        count = rng.choice((1, 2, 3, 4))
        request = vary(
            rng, "how many millilitres are {c}?", "how much is {c} in ml?", "convert {c} to ml.", c=_count(count, unit)
        )
        return Exchange(
            request,
            vary(
                rng, "{c} {be} about {m} ml.", c=_count(count, unit), be="is" if count == 1 else "are", m=size * count
            ),
        )
    hot, warm = rng.choice(list(_CELSIUS.items()))
    request = vary(rng, "what is {f} degrees Fahrenheit in Celsius?", "how hot is {f} F?", "convert {f} F to C.", f=hot)
    return Exchange(request, vary(rng, "{f} degrees Fahrenheit are about {c} degrees Celsius.", f=hot, c=warm))


def duration(minutes: int) -> str:
    """`1 minute`, `8 minutes`, `1 hour and 30 minutes`."""
    hours, rest = divmod(minutes, 60)
    parts = [_count(hours, "hour")] * bool(hours) + [_count(rest, "minute")] * bool(rest)
    return " and ".join(parts)


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


SOURCES = (
    Source(swap, 3),
    Source(swap_allowed, 1.5),
    Source(cooking_time, 3),
    Source(preparation),
    Source(storage, 1.5),
    Source(freezing),
    Source(pairing, 1.5),
    Source(nature, 2),
    Source(is_a),
    Source(examples),
    Source(measures),
)
