"""Two servers under the same loads, and tables of how they compare."""

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.api import APIS
from benchmarks.floor import Machine, ModelCost, times_floor
from benchmarks.load import Server
from benchmarks.report import Summary, number, table
from benchmarks.serve import first_model, measure
from benchmarks.servers import ServerCommand, running
from benchmarks.workloads import Workload

_LOGS = Path("runs/logs")
_LATENCIES = {
    "latency p50, s": "latency_p50",
    "p99, s": "latency_p99",
    "first token p50, ms": "first_token_p50_ms",
    "p99, ms": "first_token_p99_ms",
    "inter-token p50, ms": "gap_p50_ms",
    "p99, ms ": "gap_p99_ms",
}


@dataclass(frozen=True, slots=True)
class Ground:
    """What all measurements of a model share."""

    model: Path
    machine: Machine
    cost: ModelCost
    workloads: Sequence[Workload]


@dataclass(frozen=True, slots=True)
class Round:
    """What one start of a server gave: the summaries are in the order of the workloads."""

    start_seconds: float
    summaries: list[Summary]


@dataclass(slots=True)
class Side:
    """One of the two servers, and what was measured of it."""

    command: ServerCommand
    rounds: list[Round] = field(default_factory=list)

    async def measure(self, ground: Ground, seed: int, start_limit: float) -> Round:
        """Starts the server, which has `start_limit` seconds to come up, runs the loads, and stops it.

        Raises ServerFailed, ServerUnavailable.
        """
        log = _LOGS / f"{self.command.name}-{ground.model.name}.log"
        _tell(f"{self.command.name}: starting, log in {log}")
        async with running(self.command, ground.model, log, start_limit) as server:
            _tell(f"{self.command.name}: up after {server.start_seconds:.0f} s")
            api = APIS[self.command.api](await first_model(server.url, None))
            summaries = await measure(Server(server.url, api), ground.workloads, seed, warm_up=True)
        return Round(server.start_seconds, summaries)

    def median(self, load: int, value: str) -> float | None:
        """Over the rounds, of a number of a load's summaries; None where there is none."""
        return _median(getattr(one.summaries[load], value) for one in self.rounds)

    def failures(self, load: int) -> int:
        return sum(one.summaries[load].failures for one in self.rounds)

    def times_floor(self, ground: Ground, load: int) -> float | None:
        workload = ground.workloads[load]
        return _median(times_floor(one.summaries[load], workload, ground.cost, ground.machine) for one in self.rounds)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ratios say how many times better `ours` is than `peer`: above 1 it is ahead."""

    ground: Ground
    ours: Side
    peer: Side

    async def run(self, rounds: int, start_limit: float) -> None:
        """Adds `rounds` rounds. Raises ServerFailed, ServerUnavailable; rounds that are complete by then stay."""
        for seed in range(rounds):
            _tell(f"{self.ground.model.name}, round {seed + 1} of {rounds}")
            ours = await self.ours.measure(self.ground, seed, start_limit)
            peer = await self.peer.measure(self.ground, seed, start_limit)
            self.ours.rounds.append(ours)
            self.peer.rounds.append(peer)

    def print(self) -> None:
        """Medians over the rounds, as two tables."""
        names = self.ours.command.name, self.peer.command.name
        rounds = f"median of {len(self.ours.rounds)} rounds" if len(self.ours.rounds) > 1 else "one round"
        print(f"\n{self.ground.model.name}, {rounds}; {self.ground.machine.describe()}")
        for side in (self.ours, self.peer):
            print(f"{side.command.name} was up after {number(_median(one.start_seconds for one in side.rounds))} s")
        rates = [f"{unit} {name}" for unit in ("requests/s", "tokens/s") for name in names]
        floors = [f"x floor {name}" for name in names]
        failures = [f"failed {name}" for name in names]
        loads = range(len(self.ground.workloads))
        columns = ("load", *rates, "ratio", "range", *floors, *failures)
        print("\n" + table(columns, [self._throughput(load) for load in loads]))
        print(f"\n{names[0]} / {names[1]} (ratio)")
        print(table(("load", *_LATENCIES), [self._latencies(load) for load in loads]))

    @property
    def failures(self) -> int:
        return sum(side.failures(load) for side in (self.ours, self.peer) for load in range(len(self.ground.workloads)))

    def ratios(self, load: int, value: str) -> list[float]:
        """Of every round in which both sides have the value."""
        higher_is_better = value.endswith("_per_s")
        pairs = [
            (getattr(ours.summaries[load], value), getattr(peer.summaries[load], value))
            for ours, peer in zip(self.ours.rounds, self.peer.rounds, strict=True)
        ]
        return [mine / theirs if higher_is_better else theirs / mine for mine, theirs in pairs if mine and theirs]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": str(self.ground.model),
            "machine": asdict(self.ground.machine),
            "cost": asdict(self.ground.cost),
            "loads": [self._load_as_json(load) for load in range(len(self.ground.workloads))],
            "sides": [asdict(side) | {"command": side.command.command} for side in (self.ours, self.peer)],
        }

    def _load_as_json(self, load: int) -> dict[str, Any]:
        values = ("requests_per_s", "tokens_per_s", *_LATENCIES.values())
        sides = (self.ours, self.peer)
        return {
            "load": asdict(self.ground.workloads[load]),
            "medians": {side.command.name: {value: side.median(load, value) for value in values} for side in sides},
            "ratios": {value: _median(self.ratios(load, value)) for value in values},
            "times_floor": {side.command.name: side.times_floor(self.ground, load) for side in sides},
        }

    def _throughput(self, load: int) -> list[str]:
        sides = (self.ours, self.peer)
        rates = [number(side.median(load, value)) for value in ("requests_per_s", "tokens_per_s") for side in sides]
        ratios = self.ratios(load, "tokens_per_s")
        spread = f"{number(min(ratios))}-{number(max(ratios))}" if ratios else "-"
        floors = [number(side.times_floor(self.ground, load)) for side in sides]
        failures = [str(side.failures(load)) for side in sides]
        return [self.ground.workloads[load].name, *rates, number(_median(ratios)), spread, *floors, *failures]

    def _latencies(self, load: int) -> list[str]:
        cells = [self.ground.workloads[load].name]
        for value in _LATENCIES.values():
            ours, peer = self.ours.median(load, value), self.peer.median(load, value)
            ratio = number(_median(self.ratios(load, value)))
            cells.append("-" if ours is None and peer is None else f"{number(ours)} / {number(peer)} ({ratio})")
        return cells


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
