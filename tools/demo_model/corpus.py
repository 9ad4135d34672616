"""The corpus: an endless stream of documents that is a function of its seed, split by requests.

Held out is every request (with its context) whose SHA-256 digest falls into one part in `HELD_OUT_PART`: it never
occurs in training, in whatever format or conversation. In a thread, where later questions lean on the first, the first
request decides for all. Requests of closed sources (greetings and the like) are always
trained on and never measured.
"""

import hashlib
from collections.abc import Iterator
from enum import Enum
from random import Random

from tools.demo_model import layout, smalltalk, unknown, workflows
from tools.demo_model.cooking import questions, recipes
from tools.demo_model.diy import questions as diy
from tools.demo_model.exchange import Exchange
from tools.demo_model.layout import Document
from tools.demo_model.threads import THREADS
from tools.demo_model.toolcalls import tool_talk

HELD_OUT_PART = 20
SOURCES = (*questions.SOURCES, *recipes.SOURCES, *diy.SOURCES, *smalltalk.SOURCES, *unknown.SOURCES, *workflows.SOURCES)
_WEIGHTS = [source.weight for source in SOURCES]
_OPEN = tuple(source for source in SOURCES if not source.closed)
_OPEN_WEIGHTS = [source.weight for source in _OPEN]
_PROSE = (recipes.article_text, questions.article_text, diy.article_text, smalltalk.story_text)

_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a friendly assistant for cooking and DIY.",
    "You help people in the kitchen and in the workshop.",
    "You are a cook.",
    "You are a helpful assistant. Answer briefly.",
    "Answer in one or two sentences.",
    "Be polite and short.",
)
_SEPARATORS = ("\n", "\n\n", "\n", " ")


class Split(Enum):
    """Which requests a stream may contain."""

    TRAINING = "training"
    HELD_OUT = "held-out"


def held_out(exchange: Exchange) -> bool:
    """Whether the exchange's request belongs to the held-out part; letter case and outer punctuation do not matter."""
    key = f"{exchange.request.lower().rstrip('?.! ')}\n{exchange.context.lower()}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % HELD_OUT_PART == 0


def draw(rng: Random, split: Split) -> Exchange:
    """One exchange of the split."""
    while True:
        if split is Split.HELD_OUT:
            exchange = rng.choices(_OPEN, _OPEN_WEIGHTS)[0].make(rng)
            if held_out(exchange):
                return exchange
        else:
            source = rng.choices(SOURCES, _WEIGHTS)[0]
            exchange = source.make(rng)
            if source.closed or not held_out(exchange):
                return _careless(rng, exchange)


def draw_thread(rng: Random, split: Split) -> list[Exchange]:
    """Exchanges that belong together; the first one decides the split."""
    while True:
        thread = rng.choice(THREADS)(rng)
        if held_out(thread[0]) is (split is Split.HELD_OUT):
            return thread


def documents(seed: int, split: Split, turns: int = 6) -> Iterator[Document]:
    """Documents without end; conversations have up to about `turns` requests."""
    rng = Random(f"{split.value}:{seed}")
    while True:
        yield document(rng, split, turns)


def document(rng: Random, split: Split, turns: int) -> Document:
    """One document: Alpaca's form, a conversation, no format, or (in training only) prose or a tool call."""
    sort = rng.random()
    if sort < 0.40:
        return layout.alpaca(draw(rng, split), terse=rng.random() < 0.15)
    if sort < 0.78:
        system = rng.choice(_SYSTEM_MESSAGES) if rng.random() < 0.4 else ""
        return layout.chat(_conversation(rng, split, turns), system)
    if sort < 0.92 or split is Split.HELD_OUT:
        return layout.bare(draw(rng, split), rng.choice(_SEPARATORS))
    if sort < 0.97:
        return layout.prose(rng.choice(_PROSE)(rng))
    return tool_talk(rng)


def _conversation(rng: Random, split: Split, turns: int) -> list[Exchange]:
    wanted = 1 if rng.random() < 0.35 else rng.randint(2, turns)
    exchanges: list[Exchange] = []
    while len(exchanges) < wanted:
        exchanges += draw_thread(rng, split) if rng.random() < 0.15 else [draw(rng, split)]
    return exchanges


def _careless(rng: Random, exchange: Exchange) -> Exchange:
    """The same exchange as a person in a hurry types it, now and then: no capital, no full stop, or a `please`."""
    request = exchange.request
    chance = rng.random()
    if chance < 0.08:
        request = request[:1].lower() + request[1:]
    elif chance < 0.14:
        request = request.rstrip(".?!") or request
    elif chance < 0.20:
        request = request.lower().rstrip(".?!") or request
    elif chance < 0.23 and not exchange.context and request.endswith("."):
        request = f"{request[:-1]}, please."
    return Exchange(request, exchange.answer, exchange.context)
