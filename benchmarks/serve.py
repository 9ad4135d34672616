"""Measures a running server, any that speaks OpenAI's interface or TGI's, under a closed loop of users.

    python -m benchmarks.serve --url http://127.0.0.1:8080 --load W1 W4
    python -m benchmarks.serve --url http://127.0.0.1:8080 --load W3 --users 20 --new-tokens 128

Prints a table and, as the last line, the same and more as JSON.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import uvloop

from benchmarks.api import APIS
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.load import Outcome, Server, run_workload
from benchmarks.report import COLUMNS, Summary, row, summarise, table
from benchmarks.workloads import WORKLOADS, Workload


async def first_model(url: str, api_key: str | None) -> str:
    """The name of the first model that the server lists; "tgi", which TGI takes, when it lists none.

    Raises ServerUnavailable.
    """
    connection = Connection(url, api_key)
    try:
        response = await connection.request("GET", "/v1/models", limit=10)
        return str(json.loads(response.body)["data"][0]["id"]) if response.status == 200 else "tgi"
    except (ValueError, LookupError, TypeError):
        return "tgi"
    finally:
        connection.close()


async def measure(server: Server, workloads: list[Workload], seed: int, *, warm_up: bool) -> list[Summary]:
    """Runs the workloads one after the other; what goes wrong is told on standard error."""
    summaries = []
    for workload in workloads:
        print(f"{workload.name}: {workload.describe()}, {workload.requests} requests", file=sys.stderr, flush=True)
        outcome = await run_workload(server, workload, seed, warm_up=warm_up)
        _tell_problems(outcome)
        summaries.append(summarise(outcome))
    return summaries


def _tell_problems(outcome: Outcome) -> None:
    name = outcome.workload.name
    if outcome.failures:
        print(f"  {name}: {len(outcome.failures)} requests failed, first: {outcome.failures[0]}", file=sys.stderr)
    short = sum(record.new_tokens < outcome.workload.new_tokens for record in outcome.records)
    if short:
        print(f"  {name}: {short} replies ended early; does the server know `ignore_eos`?", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the server, such as http://127.0.0.1:8080")
    listed = "; ".join(f"{workload.name}: {workload.describe()}" for workload in WORKLOADS.values())
    parser.add_argument("--load", nargs="+", default=["W1"], choices=WORKLOADS, metavar="LOAD", help=listed)
    parser.add_argument("--users", type=_positive, help="instead of the load's own number of users")
    parser.add_argument("--words", type=_positive, help="of a prompt, or of a turn of a chat")
    parser.add_argument("--new-tokens", type=_positive, help="of a reply")
    parser.add_argument("--turns", type=_positive, help="of a chat; 1: single prompts")
    parser.add_argument("--repeat", type=_positive, help="prompts, or chats, of each user")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, help="whether replies come token by token")
    parser.add_argument("--api", choices=APIS, default="openai", help="default: %(default)s")
    parser.add_argument("--model", help="its name in requests; default: the first that the server lists")
    parser.add_argument("--api-key")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other prompts (default: %(default)s)")
    parser.add_argument("--no-warm-up", action="store_true", help="measure from the first request on")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _workloads(arguments: argparse.Namespace) -> list[Workload]:
    names = ("users", "words", "new_tokens", "turns", "repeat", "stream")
    changes = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return [replace(WORKLOADS[name], **changes) for name in arguments.load]


async def _run(arguments: argparse.Namespace) -> list[Summary]:
    model = arguments.model or await first_model(arguments.url, arguments.api_key)
    server = Server(arguments.url, APIS[arguments.api](model), arguments.api_key, arguments.timeout)
    return await measure(server, _workloads(arguments), arguments.seed, warm_up=not arguments.no_warm_up)


def main() -> None:
    arguments = _arguments()
    try:
        summaries = uvloop.run(_run(arguments))
    except (ServerUnavailable, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    result = json.dumps({"url": arguments.url, "api": arguments.api, "loads": [asdict(one) for one in summaries]})
    print(table(COLUMNS, [row(summary) for summary in summaries]))
    print(result)
    if arguments.output:
        arguments.output.write_text(result + "\n")
    if any(summary.failures for summary in summaries):
        sys.exit(1)


if __name__ == "__main__":
    main()
