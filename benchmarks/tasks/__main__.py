"""Runs tasks whose answers a program can check, on one server, or on Oatmill and others one after the other.

    python -m benchmarks.tasks --url http://127.0.0.1:8080
    python -m benchmarks.tasks --start model.gguf --peer llama.cpp --peer-programs /opt/peers/llama/bin
    python -m benchmarks.tasks --start model.gguf --family decisions
    python -m benchmarks.tasks --start model.gguf --answers new.jsonl --beside llama-cpp.jsonl

Families: calls of tools, extraction into JSON schemas, spans, choices and questions of yes or no (by `/v1/decisions`,
by a grammar, and free), functions of Python that are run against tests, and a hundred cases of `bfcl-eval`, if that
package is installed or given. All servers get the same requests, greedy. Prints a table; the last line is JSON;
`--answers FILE` stores every request and answer, and `--beside FILE` shows the stored answers of an earlier run beside
the new ones. Times depend on how busy the machine is; scores do not.
"""

import argparse
import sys
from collections.abc import Sequence, Set
from pathlib import Path

import uvloop

from benchmarks.connection import ServerUnavailable
from benchmarks.report import finish, tell
from benchmarks.serve import first_model
from benchmarks.servers import (
    ServerDidNotStart,
    add_peer_arguments,
    add_server_arguments,
    chosen_peers,
    running,
    started_here,
)
from benchmarks.tasks import bfcl, calls, choices, extraction, functions
from benchmarks.tasks.case import TaskCase
from benchmarks.tasks.results import AnswersFile, TaskResult, ask, print_tables, rows
from benchmarks.workloads import positive

_LOGS = Path("runs/logs")
Side = tuple[str, list[TaskResult]]


def all_cases(package: Path | None) -> list[TaskCase]:
    """Returns the cases of all families. package: of bfcl-eval. Raises ValueError if it has no data."""
    folder = bfcl.data_folder(package)
    if folder is None:
        tell("bfcl-eval is not installed: its cases are left out; --bfcl takes a wheel")
    public = [] if folder is None else bfcl.cases(folder)
    own = (calls.cases(), extraction.cases(), extraction.span_cases(), choices.cases(), functions.cases())
    return [*(each for made in own for each in made), *public]


def chosen_cases(cases: Sequence[TaskCase], families: Sequence[str], first: int | None) -> list[TaskCase]:
    """Returns the cases of families whose names contain one of the texts; of each family the `first` ones."""
    chosen: dict[str, list[TaskCase]] = {}
    for case in cases:
        if not families or any(each in case.family for each in families):
            chosen.setdefault(case.family, []).append(case)
    return [case for each in chosen.values() for case in each[:first]]


def _earlier(files: Sequence[Path], families: Set[str]) -> list[Side]:
    """Returns the results of earlier runs in some families, by server. Raises ValueError."""
    sides: dict[str, list[TaskResult]] = {}
    for file in files:
        for name, results in AnswersFile(file).read().items():
            sides.setdefault(f"{name}, earlier", []).extend(each for each in results if each.family in families)
    return list(sides.items())


async def _run(arguments: argparse.Namespace, cases: Sequence[TaskCase]) -> list[Side]:
    if arguments.url is not None:
        return [await _ask("server", arguments.url, arguments, cases)]
    sides: list[Side] = []
    ours = started_here(arguments)
    for command in ([] if arguments.peers_only else [ours]) + chosen_peers(arguments):
        log = _LOGS / f"tasks-{command.name}.log"
        tell(f"{command.name}: starting, log in {log}")
        async with running(command, arguments.start, log, arguments.start_limit) as server:
            sides.append(await _ask(command.name, server.url, arguments, cases))
    return sides


async def _ask(name: str, url: str, arguments: argparse.Namespace, cases: Sequence[TaskCase]) -> Side:
    model = arguments.model or await first_model(url, None)

    def note(result: TaskResult) -> None:
        if result.failure is not None and result.offered:
            tell(f"  {name}: {result.family} {result.name}: {result.failure}")
        if arguments.answers is not None:
            AnswersFile(arguments.answers).append(name, result)

    return name, await ask(url, model, cases, arguments.users, arguments.timeout, note)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_arguments(parser)
    parser.add_argument("--peers-only", action="store_true", help="with --start: do not start Oatmill")
    parser.add_argument("--family", nargs="+", default=[], metavar="TEXT", help="only families whose names contain it")
    parser.add_argument("--first", type=positive, metavar="N", help="only the first N cases of each family")
    parser.add_argument("--users", type=positive, default=4, help="requests at once (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one request (default: %(default)s)")
    parser.add_argument("--bfcl", type=Path, metavar="PATH", help="a wheel or a folder of the package bfcl-eval")
    parser.add_argument(
        "--answers", type=Path, metavar="FILE", help="where to append requests and answers, a line each"
    )
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="FILE", help="answers of earlier runs to show beside"
    )
    add_peer_arguments(parser)
    arguments = parser.parse_args()
    try:
        peers = chosen_peers(arguments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.url is not None and (peers or arguments.peers_only):
        parser.error("--url measures one server; peers need --start")
    if arguments.peers_only and not peers:
        parser.error("--peers-only: name a server by --peer or --peer-command")
    return arguments


def main() -> None:
    arguments = _arguments()
    try:
        cases = chosen_cases(all_cases(arguments.bfcl), arguments.family, arguments.first)
        if not cases:
            sys.exit(f"error: no family contains {' or '.join(arguments.family)}")
        earlier = _earlier(arguments.beside, {each.family for each in cases})
        sides = uvloop.run(_run(arguments, cases)) + earlier
    except (ServerDidNotStart, ServerUnavailable, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    print_tables(sides)
    finish({name: rows(results) for name, results in sides}, arguments.output)


if __name__ == "__main__":
    main()
