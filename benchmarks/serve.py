"""Measures a running server, any that speaks OpenAI's interface or TGI's, under a closed loop of users.

    python -m benchmarks.serve --url http://127.0.0.1:8080 --load W1 W4
    python -m benchmarks.serve --url http://127.0.0.1:8080 --load W3 --users 20 --new-tokens 128

Prints a table and, as the last line, the same and more as JSON.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import uvloop

from benchmarks.api import APIS
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.load import Outcome, Server, run_workload
from benchmarks.load_arguments import add_load_arguments, chosen_loads
from benchmarks.report import COLUMNS, Summary, row, summarise, table
from benchmarks.workloads import Workload


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


async def measure(server: Server, workloads: Sequence[Workload], seed: int, *, warm_up: bool) -> list[Summary]:
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
    parser.add_argument("--api", choices=APIS, default="openai", help="default: %(default)s")
    parser.add_argument("--model", help="its name in requests; default: the first that the server lists")
    parser.add_argument("--api-key")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other prompts (default: %(default)s)")
    parser.add_argument("--no-warm-up", action="store_true", help="measure from the first request on")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    add_load_arguments(parser, default=["W1"])
    return parser.parse_args()


async def _run(arguments: argparse.Namespace) -> list[Summary]:
    model = arguments.model or await first_model(arguments.url, arguments.api_key)
    server = Server(arguments.url, APIS[arguments.api](model), arguments.api_key, arguments.timeout)
    return await measure(server, chosen_loads(arguments), arguments.seed, warm_up=not arguments.no_warm_up)


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
