"""Measures the cost of grammars for requests without one, and cost and savings for those with one.

    python -m benchmarks.grammars --model runs/synthetic/opt-125m

Starts Oatmill, and measures three things:

- company: plain requests, tokens/s, beside as many companions with a large JSON schema each, all different, and beside
  as many plain companions. Once all arrive at the same time, once the companions are running already.
- forced: a JSON object with known keys, against free text of the same number of tokens, one request at a time.
- first token: of a large JSON schema that is new, of one that has been used before, and without any.

Prints a table for each and, as the last line, everything as JSON.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from benchmarks.company import Together, keep_company
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.reply import BadReply, read_reply
from benchmarks.report import finish, number, percentile, table, tell
from benchmarks.schemas import KNOWN_KEYS, JsonSchema, large_schema
from benchmarks.servers import OURS, ServerDidNotStart, running
from benchmarks.words import text
from benchmarks.workloads import positive

_LOG = Path("runs/logs/grammars.log")
_START_SECONDS = 300.0
_PARTS = ("company", "forced", "first-token")
_PROMPT_WORDS = 32


@dataclass(frozen=True, slots=True)
class GrammarCost:
    """One way of arriving. lost: the median over the rounds of the share that plain requests lose to grammars."""

    arrival: str
    lost: float
    beside_plain: list[Together]
    beside_grammars: list[Together]

    def rows(self) -> list[list[str]]:
        rows = []
        for kind, side in (("plain", self.beside_plain), ("grammars", self.beside_grammars)):
            middle = sorted(side, key=lambda each: each.tokens_per_s)[len(side) // 2]
            lost = f"{self.lost:.1%}" if kind == "grammars" else "-"
            gaps = (number(middle.gap_p50 * 1e3), number(middle.gap_p99 * 1e3))
            rows.append([self.arrival, kind, number(middle.tokens_per_s), lost, *gaps])
        return rows


async def compare(url: str, arrival: str, requests: int, new_tokens: int, rounds: int) -> GrammarCost:
    """Measures both kinds of companions in each round, in turns first; one round before the first is not counted.

    Raises ServerUnavailable, BadReply.
    """
    sides: dict[bool, list[Together]] = {False: [], True: []}
    for turn in range(-1, rounds):
        for grammars in (False, True) if turn % 2 else (True, False):
            tell(f"company, {arrival}, round {turn + 1}: beside {'grammars' if grammars else 'plain requests'}")
            seed = f"{arrival}/{turn}/{grammars}"
            together = await keep_company(
                url, requests, new_tokens, seed, grammars=grammars, running=arrival == "running"
            )
            if turn >= 0:
                sides[grammars].append(together)
    losses = [1 - b.tokens_per_s / a.tokens_per_s for a, b in zip(sides[False], sides[True], strict=True)]
    return GrammarCost(arrival, statistics.median(losses), sides[False], sides[True])


async def measure_forced(url: str, repeat: int) -> dict[str, float]:
    """Returns medians: the tokens of a JSON object, its seconds, and those of as many tokens of free text.

    Raises ServerUnavailable, BadReply.
    """
    tell("forced tokens")
    random, measured = Random("forced"), []
    with closing(Connection(url)) as connection:
        for turn in range(repeat + 1):
            tokens, seconds = await _ask(connection, _body(random, 512, KNOWN_KEYS, seed=turn))
            _, free_seconds = await _ask(connection, _body(random, tokens, ignore_eos=True, seed=turn))
            measured.append((tokens, seconds, free_seconds))
    medians = (statistics.median(values) for values in zip(*measured[1:], strict=True))
    return dict(zip(("tokens", "json_seconds", "text_seconds"), medians, strict=True))


async def measure_first_tokens(url: str, repeat: int) -> dict[str, list[float]]:
    """Returns milliseconds until the first token of each request. Raises ServerUnavailable, BadReply."""
    tell("first tokens")
    random = Random("first")
    times: dict[str, list[float]] = {"new schema": [], "known schema": [], "no schema": []}
    with closing(Connection(url)) as connection:
        for _ in range(repeat + 1):
            schema = large_schema(random)
            for name, grammar in zip(times, (schema, schema, None), strict=True):
                body = _body(random, 2, grammar, ignore_eos=True)
                response = await connection.request("POST", "/generate_stream", body)
                times[name].append((read_reply(response).token_times[0] - response.started) * 1e3)
    return {name: measured[1:] for name, measured in times.items()}


async def _ask(connection: Connection, body: bytes) -> tuple[int, float]:
    begun = time.perf_counter()
    reply = read_reply(await connection.request("POST", "/generate", body))
    return reply.new_tokens, time.perf_counter() - begun


def _body(random: Random, new_tokens: int, grammar: JsonSchema | None = None, **options: Any) -> bytes:
    form = None if grammar is None else {"type": "json", "value": grammar}
    parameters = {"max_new_tokens": new_tokens, "details": True, "grammar": form, **options}
    return json.dumps({"inputs": text(random, _PROMPT_WORDS), "parameters": parameters}).encode()


async def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures the parts that were asked for, and prints a table of each as soon as it is there."""
    results: dict[str, Any] = {"model": str(arguments.model)}
    command = replace(OURS, command=arguments.command)
    async with running(command, arguments.model, _LOG, _START_SECONDS) as server:
        if "company" in arguments.parts:
            results["company"] = [
                await compare(server.url, arrival, arguments.requests, arguments.new_tokens, arguments.rounds)
                for arrival in ("together", "running")
            ]
            columns = ("companions", "kind", "tokens/s", "lost", "gap p50, ms", "p99, ms")
            print(table(columns, [row for each in results["company"] for row in each.rows()]) + "\n")
        if "forced" in arguments.parts:
            forced = results["forced"] = await measure_forced(server.url, arguments.repeat)
            times = forced["json_seconds"], forced["text_seconds"]
            cells = [number(forced["tokens"]), *(number(each * 1e3) for each in times), number(times[1] / times[0])]
            print(table(("tokens", "JSON, ms", "free text, ms", "times as fast"), [cells]) + "\n")
        if "first-token" in arguments.parts:
            first = results["first_token"] = await measure_first_tokens(server.url, arguments.repeat)
            rows = [[name, number(percentile(ms, 50)), number(percentile(ms, 99))] for name, ms in first.items()]
            print(table(("request", "first token p50, ms", "p99, ms"), rows) + "\n")
    return results


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="default: all")
    parser.add_argument(
        "--requests", type=positive, default=32, help="plain ones, and companions (default: %(default)s)"
    )
    parser.add_argument("--new-tokens", type=positive, default=64, help="of a plain request (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="of company (default: %(default)s)")
    parser.add_argument("--repeat", type=positive, default=10, help="of the others (default: %(default)s)")
    parser.add_argument("--command", default=OURS.command, help="starts the server (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    try:
        results = uvloop.run(_run(arguments))
    except (ServerDidNotStart, ServerUnavailable, BadReply, ValueError) as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("interrupted")
    finish(results, arguments.output)


if __name__ == "__main__":
    main()
