"""Measures decisions: what many questions about one text cost beside one question, about new and about known texts.

    python -m benchmarks.decisions --start MODEL
    python -m benchmarks.decisions --url http://127.0.0.1:8080

Each round sends a new text with one question, another new text with `--questions` questions, and then the second text,
which the prefix cache has by then, with one other question and with as many others. `steps`: calls to the shards.
`computed`: prompt tokens that were not found in the prefix cache.
"""

import argparse
import json
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import time_ns
from typing import Any

import uvloop

from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.reply import BadReply
from benchmarks.report import finish, number, table, tell
from benchmarks.serve import first_model
from benchmarks.servers import ServerDidNotStart, add_server_arguments, running, started_here
from benchmarks.words import COMMON, text
from benchmarks.workloads import positive

_LOG = Path("runs/logs/decisions.log")
_KINDS = ("predicate", "choice", "score")
_CALLS = re.compile(r"^tgi_batch_inference_count(?:_total)?\{.*\} (\S+)$", re.MULTILINE)
_TOKENS = re.compile(r"^tgi_prefix_cache_(lookup|hit)_tokens_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Decided:
    """One request. known: the prefix cache had the text. tokens: of all its prompts; computed: those not cached."""

    known: bool
    questions: int
    seconds: float
    steps: int
    tokens: int
    computed: int


class DecisionClient:
    """Asks one server about texts, and counts what that costs."""

    def __init__(self, connection: Connection, model: str, kinds: Sequence[str], seed: str) -> None:
        """kinds: of questions, in turn."""
        self._connection = connection
        self._model = model
        self._kinds = kinds
        self._random = Random(seed)

    def new_text(self, words: int) -> str:
        return text(self._random, words)

    async def ask(self, words: str, questions: int, *, known: bool) -> Decided:
        """Raises ServerUnavailable, BadReply."""
        body = {"model": self._model, "input": words, "questions": [self._question(each) for each in range(questions)]}
        before = await self._counts()
        response = await self._connection.request("POST", "/v1/decisions", json.dumps(body).encode())
        if response.status != 200:
            raise BadReply(f"{response.status}: {response.body[:300].decode(errors='replace')}")
        steps, looked_up, found = (after - earlier for after, earlier in zip(await self._counts(), before, strict=True))
        return Decided(known, questions, response.ended - response.started, steps, looked_up, looked_up - found)

    def _question(self, place: int) -> dict[str, Any]:
        """Returns a question about words that differ."""
        first, second, third = self._random.choices(COMMON, k=3)
        match kind := self._kinds[place % len(self._kinds)]:
            case "predicate":
                return {"type": kind, "instructions": f"Does the text speak of {first}?"}
            case "choice":
                choices = [{"value": first}, {"value": f"{second} or {third}"}]
                return {"type": kind, "instructions": "What is the text about?", "choices": choices}
            case _:
                levels = [{"label": "not at all"}, {"label": "a little"}, {"label": "much"}]
                return {"type": kind, "instructions": f"How much of it is {first}?", "levels": levels}

    async def _counts(self) -> tuple[int, int, int]:
        """Returns calls of the shards, and tokens looked up and found in the prefix cache, since the server's start."""
        shown = (await self._connection.request("GET", "/metrics")).body.decode()
        tokens = {kind: int(float(count)) for kind, count in _TOKENS.findall(shown)}
        return sum(int(float(count)) for count in _CALLS.findall(shown)), tokens["lookup"], tokens["hit"]


async def measure(url: str, arguments: Namespace) -> list[Decided]:
    """Raises ServerUnavailable, BadReply."""
    found = []
    model = arguments.model or await first_model(url, None)
    with closing(Connection(url)) as connection:
        client = DecisionClient(connection, model, arguments.kinds, f"{time_ns()}")
        for round_ in range(-1, arguments.rounds):  # the first is not counted
            texts = [client.new_text(arguments.words) for _ in range(2)]
            asked = [
                await client.ask(texts[0], 1, known=False),
                await client.ask(texts[1], arguments.questions, known=False),
                await client.ask(texts[1], 1, known=True),
                await client.ask(texts[1], arguments.questions, known=True),
            ]
            tell(f"round {round_ + 1}: {', '.join(f'{each.seconds:.3f}' for each in asked)} s")
            found += asked if round_ >= 0 else []
    return found


def _print(found: list[Decided], questions: int) -> None:
    columns = ("text", "questions", "seconds", "range", "steps", "tokens", "computed", "x one question")
    rows = []
    for known in (False, True):
        one = 0.0
        for count in (1, questions):
            alike = [each for each in found if (each.known, each.questions) == (known, count)]
            times = sorted(each.seconds for each in alike)
            one = one or median(times)
            figures = [median(getattr(each, name) for each in alike) for name in ("steps", "tokens", "computed")]
            rows.append(
                [
                    *("known" if known else "new", str(count), number(median(times))),
                    f"{number(times[0])}-{number(times[-1])}",
                    *(f"{figure:.0f}" for figure in figures),
                    number(median(times) / one),
                ]
            )
    print(table(columns, rows), "\n")


async def _run(arguments: Namespace) -> list[Decided]:
    if arguments.start is None:
        return await measure(arguments.url, arguments)
    tell(f"starting, log in {_LOG}")
    async with running(started_here(arguments), arguments.start, _LOG, arguments.start_limit) as server:
        return await measure(server.url, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_arguments(parser)
    parser.add_argument("--words", type=positive, default=1_500, help="of a text (default: %(default)s)")
    parser.add_argument("--questions", type=positive, default=20, help="about one text (default: %(default)s)")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=_KINDS,
        default=_KINDS,
        help="of questions, in turn (default: all); a predicate takes several sequences with a tokenizer, such as the "
        "synthetic one, in which Yes and No have several tokens",
    )
    parser.add_argument("--rounds", type=positive, default=5, help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        found = uvloop.run(_run(arguments))
    except (ServerDidNotStart, ServerUnavailable, BadReply, ValueError) as error:
        sys.exit(f"error: {error}")
    _print(found, arguments.questions)
    finish(found, arguments.output)


if __name__ == "__main__":
    main()
