"""What grammars cost those who have none, and what they cost and save those who have one.

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from benchmarks.company import Company, Together, keep_company
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.reply import BadReply, read_reply
from benchmarks.report import number, percentile, table
from benchmarks.schemas import KNOWN_KEYS, Schema, large_schema
from benchmarks.servers import OURS, ServerCommand, ServerFailed, running
from benchmarks.words import text

_LOG = Path("runs/logs/grammars.log")
_START_SECONDS = 300.0
_PARTS = ("company", "forced", "first-token")
_PROMPT_WORDS = 32


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way of arriving. lost: the median over the rounds of what the plain requests lose, as a share."""

    arrival: str
    lost: float
    beside_plain: list[Together]
    beside_grammars: list[Together]


@dataclass(frozen=True, slots=True)
class Forced:
    """Medians. Seconds of a request; tokens: of the JSON object, and of the free text."""

    tokens: float
    json_seconds: float
    text_seconds: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Milliseconds until the first token."""

    request: str
    p50_ms: float
    p99_ms: float


async def compare(url: str, arrival: str, requests: int, new_tokens: int, rounds: int) -> Comparison:
    """Both kinds of companions in each round, in turns first; before the first round, one that is not counted.

    Raises ServerUnavailable, BadReply.
    """
    sides: dict[bool, list[Together]] = {False: [], True: []}
    there_before = arrival == "running"
    for turn in range(-1, rounds):
        for grammars in (False, True) if turn % 2 else (True, False):
            _tell(f"company, {arrival}, round {turn + 1}: beside {'grammars' if grammars else 'plain requests'}")
            seed = f"{arrival}/{turn}/{grammars}"
            together = await keep_company(url, Company(grammars, there_before), requests, new_tokens, seed)
            if turn >= 0:
                sides[grammars].append(together)
    losses = [1 - b.tokens_per_s / a.tokens_per_s for a, b in zip(sides[False], sides[True], strict=True)]
    return Comparison(arrival, statistics.median(losses), sides[False], sides[True])


async def measure_forced(url: str, repeat: int) -> Forced:
    """Raises ServerUnavailable, BadReply."""
    _tell("forced tokens")
    connection, random = Connection(url), Random("forced")
    lengths, structured, free = [], [], []
    for turn in range(-1, repeat):
        tokens, seconds = await _ask(connection, _body(random, 512, KNOWN_KEYS, seed=turn + 1))
        _, free_seconds = await _ask(connection, _body(random, tokens, ignore_eos=True, seed=turn + 1))
        if turn >= 0:
            lengths.append(tokens)
            structured.append(seconds)
            free.append(free_seconds)
    connection.close()
    return Forced(*map(statistics.median, (lengths, structured, free)))


async def measure_first_tokens(url: str, repeat: int) -> list[FirstToken]:
    """Raises ServerUnavailable, BadReply."""
    _tell("first tokens")
    connection, random = Connection(url), Random("first")
    times: dict[str, list[float]] = {"new schema": [], "known schema": [], "no schema": []}
    for turn in range(-1, repeat):
        schema = large_schema(random)
        for name, grammar in zip(times, (schema, schema, None), strict=True):
            response = await connection.request("POST", "/generate_stream", _body(random, 2, grammar, ignore_eos=True))
            moments = read_reply(response).token_times
            if turn >= 0:
                times[name].append((moments[0] - response.started) * 1e3)
    connection.close()
    return [FirstToken(name, percentile(all_, 50) or 0.0, percentile(all_, 99) or 0.0) for name, all_ in times.items()]


async def _ask(connection: Connection, body: bytes) -> tuple[int, float]:
    """Tokens and seconds."""
    begun = time.perf_counter()
    reply = read_reply(await connection.request("POST", "/generate", body))
    return reply.new_tokens, time.perf_counter() - begun


def _body(random: Random, new_tokens: int, grammar: Schema | None = None, **options: Any) -> bytes:
    form = None if grammar is None else {"type": "json", "value": grammar}
    parameters = {"max_new_tokens": new_tokens, "details": True, "grammar": form, **options}
    return json.dumps({"inputs": text(random, _PROMPT_WORDS), "parameters": parameters}).encode()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def _run(arguments: argparse.Namespace, command: ServerCommand) -> dict[str, Any]:
    results: dict[str, Any] = {"model": str(arguments.model)}
    async with running(command, arguments.model, _LOG, _START_SECONDS) as server:
        if "company" in arguments.parts:
            results["company"] = [
                await compare(server.url, arrival, arguments.requests, arguments.new_tokens, arguments.rounds)
                for arrival in ("together", "running")
            ]
        if "forced" in arguments.parts:
            results["forced"] = await measure_forced(server.url, arguments.repeat)
        if "first-token" in arguments.parts:
            results["first_token"] = await measure_first_tokens(server.url, arguments.repeat)
    return results


def _print(results: dict[str, Any]) -> None:
    if "company" in results:
        columns = ("companions", "kind", "tokens/s", "lost", "gap p50, ms", "p99, ms", "their tokens/s", "running")
        print(table(columns, [row for each in results["company"] for row in _company_rows(each)]) + "\n")
    if "forced" in results:
        forced = results["forced"]
        cells = (forced.tokens, forced.json_seconds * 1e3, forced.text_seconds * 1e3)
        ratio = f"{forced.text_seconds / forced.json_seconds:.2f}"
        print(table(("tokens", "JSON, ms", "free text, ms", "times as fast"), [[*map(number, cells), ratio]]) + "\n")
    if "first_token" in results:
        rows = [[each.request, number(each.p50_ms), number(each.p99_ms)] for each in results["first_token"]]
        print(table(("request", "first token p50, ms", "p99, ms"), rows) + "\n")


def _company_rows(compared: Comparison) -> list[list[str]]:
    rows = []
    for kind, side in (("plain", compared.beside_plain), ("grammars", compared.beside_grammars)):
        middle = sorted(side, key=lambda each: each.tokens_per_s)[len(side) // 2]
        lost = f"{compared.lost:.1%}" if kind == "grammars" else "-"
        gaps = (number(middle.gap_p50 * 1e3), number(middle.gap_p99 * 1e3))
        speed, theirs = number(middle.tokens_per_s), number(middle.companions_per_s)
        rows.append([compared.arrival, kind, speed, lost, *gaps, theirs, f"{middle.running:.0%}"])
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="default: all")
    parser.add_argument("--requests", type=int, default=32, help="plain ones, and companions (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a plain request (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of company (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=10, help="of the others (default: %(default)s)")
    parser.add_argument("--command", default=OURS.command, help="starts the server (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    if min(arguments.requests, arguments.new_tokens, arguments.rounds, arguments.repeat) < 1:
        parser.error("--requests, --new-tokens, --rounds and --repeat are at least 1")
    return arguments


def main() -> None:
    arguments = _arguments()
    try:
        results = uvloop.run(_run(arguments, replace(OURS, command=arguments.command)))
    except (ServerFailed, ServerUnavailable, BadReply, ValueError) as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("interrupted")
    _print(results)
    result = json.dumps(results, default=asdict)
    print(result)
    if arguments.output:
        arguments.output.write_text(result + "\n")


if __name__ == "__main__":
    main()
