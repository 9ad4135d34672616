"""The same load on Oatmill and on another server, one after the other, in several rounds.

    python -m benchmarks.peers --model runs/synthetic/opt-125m --peer vllm --peer-programs /opt/peers/vllm/bin
    python -m benchmarks.peers --model runs/synthetic/opt-125m --peer naive --load W1
    python -m benchmarks.peers --model MODEL --peer-command "my-server --model {model} --port {port}" --peer-api tgi

Only one server runs at a time. Prints, for each load, the medians over the rounds, how many times better Oatmill is,
and how many times as long as the floor each takes; the last line is everything as JSON.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmarks.api import APIS
from benchmarks.comparison import Comparison, Ground, Side
from benchmarks.connection import ServerUnavailable
from benchmarks.floor import Machine, ModelCost
from benchmarks.load_arguments import add_load_arguments, chosen_loads
from benchmarks.servers import OURS, PEERS, ServerCommand, ServerFailed
from benchmarks.workloads import WORKLOADS, Workload

_BUSY = 0.5
"""Running threads, on average over a minute, that disturb a measurement."""


def measure_ground(model: Path, workloads: Sequence[Workload]) -> Ground:
    """Measures the machine, in a process of its own: torch shall not stay loaded beside the servers.

    Raises ValueError.
    """
    command = [sys.executable, "-m", "benchmarks.machine", "--model", str(model)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ValueError(
            (result.stderr.strip().splitlines() or ["the machine could not be measured"])[-1].removeprefix("error: ")
        )
    measured = json.loads(result.stdout)
    return Ground(model, Machine(**measured["machine"]), ModelCost(**measured["cost"]), workloads)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="model folders, one after the other")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--start-limit", type=float, default=600, help="seconds for a server to get healthy")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    ours = parser.add_argument_group("Oatmill")
    ours.add_argument("--our-command", default=OURS.command, help="default: %(default)s")
    ours.add_argument("--our-api", choices=APIS, default="openai", help="default: %(default)s")
    peer = parser.add_argument_group("peer")
    which = peer.add_mutually_exclusive_group(required=True)
    which.add_argument("--peer", choices=PEERS, help="a server that this command knows how to start")
    which.add_argument("--peer-command", help="how to start another one, with {model} and {port}; needs a GET /health")
    peer.add_argument("--peer-programs", type=Path, metavar="FOLDER", help="where to look for its programs first")
    peer.add_argument("--peer-env", nargs="+", default=[], metavar="NAME=VALUE", help="environment variables for it")
    peer.add_argument("--peer-api", choices=APIS, default="openai", help="default: %(default)s")
    add_load_arguments(parser, default=list(WORKLOADS))
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds is at least 1")
    if wrong := [pair for pair in arguments.peer_env if "=" not in pair]:
        parser.error(f"--peer-env: {wrong[0]!r} is not NAME=VALUE")
    return arguments


def _peer(arguments: argparse.Namespace) -> ServerCommand:
    known = PEERS[arguments.peer] if arguments.peer else ServerCommand("peer", arguments.peer_command)
    environment = dict(pair.split("=", 1) for pair in arguments.peer_env)
    programs = arguments.peer_programs.resolve() if arguments.peer_programs else known.programs
    environment = {**known.environment, **environment}
    return replace(known, environment=environment, programs=programs, api=arguments.peer_api)


def _compare(comparison: Comparison, arguments: argparse.Namespace) -> str | None:
    """Runs and prints a model's rounds. Returns what went wrong, if anything did; what came before it is printed."""
    problem = None
    try:
        uvloop.run(comparison.run(arguments.rounds, arguments.start_limit))
    except (ServerFailed, ServerUnavailable) as error:
        problem = str(error)
    if comparison.ours.rounds:
        comparison.print()
    return problem or (f"{comparison.failures} requests failed" if comparison.failures else None)


def main() -> None:
    arguments = _arguments()
    ours = replace(OURS, command=arguments.our_command, api=arguments.our_api)
    peer, workloads = _peer(arguments), chosen_loads(arguments)
    load = os.getloadavg()[0]
    if load > _BUSY:
        print(f"this machine is busy (load {load:.1f}): what it measures now is not its best", file=sys.stderr)
    comparisons, problems = [], []
    try:
        for model in arguments.model:
            for side in (ours, peer):
                side.arguments(model, port=0)
            comparison = Comparison(measure_ground(model, workloads), Side(ours), Side(peer))
            problems.append(_compare(comparison, arguments))
            comparisons.append(comparison.as_json())
    except ValueError as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("interrupted")
    result = json.dumps(comparisons, default=str)
    print("\n" + result)
    if arguments.output:
        arguments.output.write_text(result + "\n")
    if any(problems):
        sys.exit("error: " + "; ".join(problem for problem in problems if problem))


if __name__ == "__main__":
    main()
