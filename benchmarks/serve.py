"""Measures a running server, any that speaks OpenAI's interface or TGI's, under a closed loop of users.

    python -m benchmarks.serve --url http://127.0.0.1:8080 --load W1 W4
    python -m benchmarks.serve --url http://127.0.0.1:8080 --load W3 --users 20 --new-tokens 128
    python -m benchmarks.serve --start runs/synthetic/opt-125m      starts Oatmill, and stops it in the end

Prints a table and, as the last line, the same and more as JSON.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import uvloop

from benchmarks.api import APIS
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.load import Target, WorkloadResult, run_workload
from benchmarks.report import COLUMNS, Summary, finish, number, row, summarise, table, tell
from benchmarks.servers import ServerDidNotStart, add_server_arguments, running, started_here
from benchmarks.workloads import Workload, add_load_arguments, chosen_loads

_LOG = Path("runs/logs/serve.log")


async def first_model(url: str, api_key: str | None) -> str:
    """Returns the name of the first model that the server lists; "tgi", which TGI takes, when it lists none.

    Raises ServerUnavailable.
    """
    with closing(Connection(url, api_key)) as connection:
        response = await connection.request("GET", "/v1/models", limit=10)
    try:
        return str(json.loads(response.body)["data"][0]["id"]) if response.status == 200 else "tgi"
    except (ValueError, LookupError, TypeError):
        return "tgi"


async def measure(server: Target, workloads: Sequence[Workload], seed: int, *, warm_up: bool) -> list[Summary]:
    """Runs the workloads one after the other; what goes wrong is written to standard error."""
    summaries = []
    for workload in workloads:
        tell(f"{workload.name}: {workload.describe()}, {workload.requests} requests")
        outcome = await run_workload(server, workload, seed, warm_up=warm_up)
        _tell_problems(outcome)
        summaries.append(summarise(outcome))
        tell(f"  {workload.name}: {number(summaries[-1].tokens_per_s)} tokens/s")
    return summaries


def _tell_problems(outcome: WorkloadResult) -> None:
    name = outcome.workload.name
    if outcome.failures:
        tell(f"  {name}: {len(outcome.failures)} requests failed, first: {outcome.failures[0]}")
    short = sum(record.new_tokens < outcome.workload.new_tokens for record in outcome.records)
    if short:
        tell(f"  {name}: {short} replies ended early; does the server know `ignore_eos`?")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_arguments(parser)
    parser.add_argument("--api", choices=APIS, default="openai", help="default: %(default)s")
    parser.add_argument("--api-key")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other prompts (default: %(default)s)")
    parser.add_argument("--no-warm-up", action="store_true", help="measure from the first request on")
    add_load_arguments(parser, default=["W1"])
    return parser.parse_args()


async def _run(arguments: argparse.Namespace) -> list[Summary]:
    if arguments.start is None:
        return await _measure(arguments, arguments.url)
    adapters = max(workload.adapters for workload in chosen_loads(arguments))
    ours = started_here(arguments)
    async with running(ours, arguments.start, _LOG, arguments.start_limit, adapters) as server:
        return await _measure(arguments, server.url)


async def _measure(arguments: argparse.Namespace, url: str) -> list[Summary]:
    model = arguments.model or await first_model(url, arguments.api_key)
    server = Target(url, APIS[arguments.api](model), arguments.api_key, arguments.timeout)
    return await measure(server, chosen_loads(arguments), arguments.seed, warm_up=not arguments.no_warm_up)


def main() -> None:
    arguments = _arguments()
    try:
        summaries = uvloop.run(_run(arguments))
    except (ServerDidNotStart, ServerUnavailable, ValueError) as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("interrupted")
    print(table(COLUMNS, [row(summary) for summary in summaries]))
    finish({"server": arguments.url or arguments.start, "api": arguments.api, "loads": summaries}, arguments.output)
    if any(summary.failures for summary in summaries):
        sys.exit(1)


if __name__ == "__main__":
    main()
