"""Measures Oatmill and other servers under the same loads, one server after the other, in several rounds.

    python -m benchmarks.peers --model runs/synthetic/opt-125m --peer vllm --peer-programs /opt/peers/vllm/bin
    python -m benchmarks.peers --model MODEL --peer-command "my-server --model {model} --port {port}" --peer-api tgi

Only one server runs at a time. Prints, for each load, the medians over the rounds, the ratio of Oatmill to each of the
others (above 1: Oatmill is better), and the ratio of each time to its floor; the last line is everything as JSON.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop

from benchmarks.api import APIS
from benchmarks.connection import ServerUnavailable
from benchmarks.floor import Machine, ModelCost, times_floor
from benchmarks.load import Target
from benchmarks.report import LATENCIES, Summary, finish, number, table, tell
from benchmarks.serve import first_model, measure
from benchmarks.servers import OURS, ServerCommand, ServerDidNotStart, add_peer_arguments, chosen_peers, running
from benchmarks.workloads import WORKLOADS, Workload, add_load_arguments, chosen_loads, positive

_LOGS = Path("runs/logs")
# Running threads, on average over a minute, that disturb a measurement.
_BUSY = 0.5
_LATENCIES = ("latency_p50", "latency_p99", "first_token_p50_ms", "first_token_p99_ms", "gap_p50_ms", "gap_p99_ms")


@dataclass(frozen=True, slots=True)
class Round:
    """The results of one start of a server; the summaries are in the order of the workloads."""

    start_seconds: float
    summaries: list[Summary]


@dataclass(slots=True)
class Side:
    """One of the servers, and what was measured of it."""

    command: ServerCommand
    rounds: list[Round] = field(default_factory=list)

    def median(self, load: int, value: str) -> float | None:
        """Returns the median over the rounds of a number in a load's summaries; None where there is none."""
        return _median(getattr(one.summaries[load], value) for one in self.rounds)

    def failures(self, load: int) -> int:
        return sum(one.summaries[load].failures for one in self.rounds)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ratios say how many times better `ours` is than a peer: above 1 it is ahead."""

    model: Path
    machine: Machine
    cost: ModelCost
    workloads: Sequence[Workload]
    ours: Side
    peers: Sequence[Side]

    @property
    def sides(self) -> list[Side]:
        return [self.ours, *self.peers]

    async def run(self, rounds: int, start_limit: float) -> None:
        """Adds `rounds` rounds. Raises ServerDidNotStart, ServerUnavailable; rounds that are complete by then stay."""
        for seed in range(rounds):
            tell(f"{self.model.name}, round {seed + 1} of {rounds}")
            order = self.order(seed)
            measured = [await self._measure(side.command, seed, start_limit) for side in order]
            for side, one in zip(order, measured, strict=True):
                side.rounds.append(one)

    def order(self, number_: int) -> list[Side]:
        """Returns the servers in the order of a round: each goes first in turn, since the machine changes meanwhile."""
        first = number_ % len(self.sides)
        return self.sides[first:] + self.sides[:first]

    async def _measure(self, command: ServerCommand, seed: int, start_limit: float) -> Round:
        log = _LOGS / f"{command.name}-{self.model.name}.log"
        tell(f"{command.name}: starting, log in {log}")
        adapters, length = (max(getattr(load, name) for load in self.workloads) for name in ("adapters", "length"))
        async with running(command, self.model, log, start_limit, adapters, length) as server:
            tell(f"{command.name}: up after {server.start_seconds:.0f} s")
            api = APIS[command.api](await first_model(server.url, None))
            return Round(
                server.start_seconds, await measure(Target(server.url, api), self.workloads, seed, warm_up=True)
            )

    @property
    def failures(self) -> int:
        return sum(side.failures(load) for side in self.sides for load in range(len(self.workloads)))

    def ratios(self, peer: Side, load: int, value: str) -> list[float]:
        """Returns the ratio to a peer of every round in which both sides have the value."""
        higher_is_better = value.endswith("_per_s")
        pairs = [
            (getattr(ours.summaries[load], value), getattr(peer.summaries[load], value))
            for ours, peer in zip(self.ours.rounds, peer.rounds, strict=True)
        ]
        return [mine / theirs if higher_is_better else theirs / mine for mine, theirs in pairs if mine and theirs]

    def times_floor(self, side: Side, load: int) -> float | None:
        workload = self.workloads[load]
        return _median(times_floor(one.summaries[load], workload, self.cost, self.machine) for one in side.rounds)

    def print(self) -> None:
        """Prints the medians over the rounds, as two tables for each peer."""
        rounds = f"median of {len(self.ours.rounds)} rounds" if len(self.ours.rounds) > 1 else "one round"
        print(f"\n{self.model.name}, {rounds}; {self.machine.describe()}")
        for side in self.sides:
            print(f"{side.command.name} was up after {number(_median(one.start_seconds for one in side.rounds))} s")
        for peer in self.peers:
            self._print_beside(peer)

    def _print_beside(self, peer: Side) -> None:
        names = [side.command.name for side in (self.ours, peer)]
        rates = [f"{unit} {name}" for unit in ("requests/s", "tokens/s") for name in names]
        floors, failures = [f"x floor {name}" for name in names], [f"failed {name}" for name in names]
        loads = range(len(self.workloads))
        columns = ("load", *rates, "ratio", "range", *floors, *failures)
        print("\n" + table(columns, [self._throughput(peer, load) for load in loads]))
        print(f"\n{names[0]} / {names[1]} (ratio)")
        print(table(("load", *LATENCIES), [self._latencies(peer, load) for load in loads]))

    def _throughput(self, peer: Side, load: int) -> list[str]:
        sides = (self.ours, peer)
        rates = [number(side.median(load, value)) for value in ("requests_per_s", "tokens_per_s") for side in sides]
        ratios = self.ratios(peer, load, "tokens_per_s")
        spread = f"{number(min(ratios))}-{number(max(ratios))}" if ratios else "-"
        floors = [number(self.times_floor(side, load)) for side in sides]
        failures = [str(side.failures(load)) for side in sides]
        return [self.workloads[load].name, *rates, number(_median(ratios)), spread, *floors, *failures]

    def _latencies(self, peer: Side, load: int) -> list[str]:
        cells = [self.workloads[load].name]
        for value in _LATENCIES:
            ours, theirs = self.ours.median(load, value), peer.median(load, value)
            ratio = number(_median(self.ratios(peer, load, value)))
            cells.append("-" if ours is None and theirs is None else f"{number(ours)} / {number(theirs)} ({ratio})")
        return cells


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def measure_machine(model: Path) -> tuple[Machine, ModelCost]:
    """Measures in a process of its own: torch shall not stay loaded beside the servers. Raises ValueError."""
    command = [sys.executable, "-m", "benchmarks.machine", "--model", str(model)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["the machine could not be measured"]
        raise ValueError(lines[-1].removeprefix("error: "))
    measured = json.loads(result.stdout)
    return Machine(**measured["machine"]), ModelCost(**measured["cost"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, nargs="+", required=True, help="folders or GGUF files, one after the other"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="default: %(default)s")
    parser.add_argument(
        "--start-limit", type=float, default=600, help="seconds for a server to get healthy (default: 600)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    parser.add_argument("--our-command", default=OURS.command, help="default: %(default)s")
    parser.add_argument("--our-api", choices=APIS, default="openai", help="default: %(default)s")
    add_peer_arguments(parser)
    add_load_arguments(parser, default=[name for name, load in WORKLOADS.items() if load.usual])
    arguments = parser.parse_args()
    try:
        if not chosen_peers(arguments):
            parser.error("name a server to compare with, by --peer or --peer-command")
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _compare(comparison: Comparison, arguments: argparse.Namespace) -> str | None:
    """Runs and prints a model's rounds. Returns what went wrong, if anything did; what came before it is printed."""
    problem = None
    try:
        uvloop.run(comparison.run(arguments.rounds, arguments.start_limit))
    except (ServerDidNotStart, ServerUnavailable) as error:
        problem = str(error)
    if comparison.ours.rounds:
        comparison.print()
    return problem or (f"{comparison.failures} requests failed" if comparison.failures else None)


def main() -> None:
    arguments = _arguments()
    ours = replace(OURS, command=arguments.our_command, api=arguments.our_api)
    peers, workloads = chosen_peers(arguments), chosen_loads(arguments)
    if (load := os.getloadavg()[0]) > _BUSY:
        print(f"this machine is busy (load {load:.1f}): what it measures now is not its best", file=sys.stderr)
    comparisons: list[Comparison] = []
    problems = []
    try:
        for model in arguments.model:
            for side in (ours, *peers):
                side.arguments(model, port=0)
            comparisons.append(Comparison(model, *measure_machine(model), workloads, Side(ours), [*map(Side, peers)]))
            problems.append(_compare(comparisons[-1], arguments))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("interrupted")
    finish(comparisons, arguments.output)
    if any(problems):
        sys.exit("error: " + "; ".join(problem for problem in problems if problem))


if __name__ == "__main__":
    main()
