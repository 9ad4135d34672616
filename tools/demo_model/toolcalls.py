"""Conversations in which the assistant calls a function: the tools, a request, the call, its result, an answer."""

import json
from collections.abc import Callable
from random import Random

from tools.demo_model.cooking.dishes import dish
from tools.demo_model.cooking.ingredients import INGREDIENTS
from tools.demo_model.exchange import vary
from tools.demo_model.layout import ASSISTANT, BOS, EOS, SYSTEM, TOOL, USER, Document, Piece
from tools.demo_model.offtopic import subject

_Call = tuple[str, dict[str, object], str, str]
"""What the user says, the arguments of the call, what the function returns, and what the assistant then says."""


def _timer(rng: Random) -> _Call:
    minutes = rng.randint(1, 90)
    said = vary(
        rng, "set a timer for {m} minutes.", "wake me in {m} minutes.", "I need a timer of {m} minutes.", m=minutes
    )
    return said, {"minutes": minutes}, '{"ok": true}', f"The timer is set to {minutes} minutes."


def _search(rng: Random) -> _Call:
    title = dish(rng).title
    said = vary(rng, "find a recipe for {d}.", "search for {d}.", "look up {d}.", "I would like to make {d}.", d=title)
    return said, {"query": title}, json.dumps({"title": title, "found": True}), f"I found a recipe for {title}."


def _list(rng: Random) -> _Call:
    thing = rng.choice(INGREDIENTS)
    said = vary(
        rng,
        "add {x}, {a}, to my list.",
        "put {x} ({a}) on the shopping list.",
        "I need to buy {x}: {a}.",
        x=thing.name,
        a=thing.amount,
    )
    return said, {"item": thing.name, "amount": thing.amount}, '{"ok": true}', f"I put {thing.name} on your list."


def _weather(rng: Random) -> _Call:
    place = subject(rng).title()
    unit, degrees = rng.choice(("celsius", "fahrenheit")), rng.randint(1, 35)
    said = vary(
        rng,
        "what is the weather in {p} in {u}?",
        "how warm is it in {p}? Use {u}.",
        "weather in {p}, {u}.",
        p=place,
        u=unit,
    )
    result = json.dumps({"degrees": degrees})
    return said, {"location": place, "unit": unit}, result, f"It is {degrees} degrees in {place}."


_FUNCTIONS: dict[str, tuple[str, dict[str, str], Callable[[Random], _Call]]] = {
    "set_timer": ("Sets a timer.", {"minutes": "integer"}, _timer),
    "search_recipe": ("Finds a recipe.", {"query": "string"}, _search),
    "add_to_list": ("Puts an item on the shopping list.", {"item": "string", "amount": "string"}, _list),
    "get_weather": ("Gets the weather of a place.", {"location": "string", "unit": "string"}, _weather),
}


def _schema(name: str) -> str:
    about, arguments, _ = _FUNCTIONS[name]
    properties = {argument: {"type": sort} for argument, sort in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return json.dumps({"name": name, "description": about, "parameters": parameters})


def tool_talk(rng: Random) -> Document:
    """One request that a function answers, in the form of the chat template and of the grammar for tool calls."""
    offered = rng.sample(list(_FUNCTIONS), rng.randint(1, 3))
    name = rng.choice(offered)
    said, arguments, result, answer = _FUNCTIONS[name][2](rng)
    listed = "\n".join(["Tools:", *map(_schema, offered)])
    call = json.dumps({"function": {"_name": name, **arguments}})
    if rng.random() < 0.5:
        return Piece(f"{BOS}{SYSTEM}{listed}{USER}{said}{ASSISTANT}", False), Piece(call + EOS, True)
    earlier = json.dumps({"name": name, "arguments": arguments})
    return (
        Piece(f"{BOS}{SYSTEM}{listed}{USER}{said}{ASSISTANT}{earlier}{EOS}{TOOL}{result}{ASSISTANT}", False),
        Piece(answer + EOS, True),
    )
