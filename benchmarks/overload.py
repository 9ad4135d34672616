"""Measures a server beyond its capacity: an open loop of requests that have to be answered within a time.

    python -m benchmarks.overload                        the router, before a shard whose steps take a fixed time
    python -m benchmarks.overload --start FOLDER         Oatmill with a model
    python -m benchmarks.overload --url URL              a server that runs, with its own order

The capacity is what a closed loop of many users gets. Then requests come at multiples of it, whatever becomes of those
before them: once with their deadlines, and once without, to a server that takes them first come, first served.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import psutil
import uvloop

from benchmarks.connection import Connection, ServerUnavailable, TimedResponse
from benchmarks.report import finish, number, percentile, table, tell
from benchmarks.servers import OURS, ServerDidNotStart, running, wait_until_healthy
from shared.addresses import free_port
from tgi_server import demo_model

_START_SECONDS, _READY_SECONDS = 600.0, 60.0
_LOG = Path("runs/logs/overload.log")
# More than wait at three times the capacity for some seconds, so that the server's limit of requests plays no part.
_MOST_REQUESTS = 4096
_COLUMNS = (
    *("order", "load", "requests/s", "in time", "of capacity", "refused", "late"),
    *("latest, ms", "refusal p50, ms", "p99, ms", "answer p50, s", "p99, s"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """A load of requests. seconds: within which it has to be answered. tokens: of the answer."""

    seconds: float
    tokens: int
    words: int

    def body(self, number: int, *, deadline: bool) -> bytes:
        """Returns a request whose prompt no other begins with. deadline: the server learns of it."""
        prompt = f"Request {number}: " + "tell me how to cook rice " * (self.words // 6)
        body = {"prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0}
        return json.dumps(body | ({"timeout_ms": int(1000 * self.seconds)} if deadline else {})).encode()


@dataclass(slots=True)
class Load:
    """The outcomes of the requests at one rate. Times in seconds.

    late: requests that got no answer in time, and were not refused. latest: by how much the last word on one came after
    its deadline.
    """

    order: str
    multiple: float
    rate: float
    seconds: float
    in_time: int = 0
    refused: int = 0
    late: int = 0
    latest: float = 0.0
    refusals: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)

    def add(self, response: TimedResponse, limit: float) -> None:
        took = response.ended - response.started
        if response.status in (429, 503):
            self.refused += 1
            self.refusals.append(took)
            return
        self.latest = max(self.latest, took - limit)
        if response.status == 200:
            self.answers.append(took)
        if response.status == 200 and took <= limit:
            self.in_time += 1
        else:
            self.late += 1

    def row(self, capacity: float) -> list[str]:
        """Returns the cells of a table."""
        refusals = (percentile(self.refusals, each) for each in (50, 99))
        answers = (percentile(self.answers, each) for each in (50, 99))
        in_time = self.in_time / self.seconds
        return [
            *(self.order, f"{self.multiple:g}", number(self.rate), str(self.in_time), f"{in_time / capacity:.0%}"),
            *(str(self.refused), str(self.late), number(1000 * self.latest)),
            *(number(None if each is None else 1000 * each) for each in refusals),
            *map(number, answers),
        ]


async def capacity(url: str, job: Job, places: int, seconds: float, numbers: Iterator[int]) -> float:
    """Returns how many requests a second are answered while many wait. places: requests in one batch."""
    ended: list[float] = []
    until = time.perf_counter() + seconds

    async def user() -> None:
        with closing(Connection(url)) as connection:
            while time.perf_counter() < until:
                response = await connection.request("POST", "/v1/completions", job.body(next(numbers), deadline=False))
                if response.status != 200:
                    raise ServerUnavailable(f"status {response.status}: {response.body[:200]!r}")
                ended.append(response.ended)

    await asyncio.gather(*(user() for _ in range(3 * places)))
    steady = sorted(each for each in ended if each <= until)
    # Those that began together end together. Without the first such wave, the time of each wave counts once.
    if len(steady) < 2 * places:
        raise ServerUnavailable(
            f"only {len(steady)} requests were answered in {seconds:g} s, and {2 * places} are needed to measure the "
            "capacity; give more with --seconds"
        )
    return (len(steady) - places) / (steady[-1] - steady[places - 1])


async def open_loop(url: str, job: Job, load: Load, numbers: Iterator[int], *, deadline: bool) -> Load:
    """Sends requests at a rate, whatever becomes of those before them, and waits for the last one."""
    idle: list[Connection] = []

    async def ask() -> None:
        connection = idle.pop() if idle else Connection(url)
        load.add(
            await connection.request("POST", "/v1/completions", job.body(next(numbers), deadline=deadline)), job.seconds
        )
        idle.append(connection)

    began = time.perf_counter()
    asked = []
    for index in range(int(load.rate * load.seconds)):
        await asyncio.sleep(max(0.0, began + index / load.rate - time.perf_counter()))
        asked.append(asyncio.create_task(ask()))
    await asyncio.gather(*asked)
    for connection in idle:
        connection.close()
    return load


@asynccontextmanager
async def _server(arguments: argparse.Namespace, admission: str) -> AsyncIterator[str]:
    """Runs the server, unless one runs. Yields its URL."""
    if arguments.url is not None:
        yield arguments.url
        return
    flags = f"--max-concurrent-requests={_MOST_REQUESTS} --max-batch-size={arguments.batch} --admission={admission}"
    flags += f" --max-connections-per-address={_MOST_REQUESTS} --prometheus-port=0 {arguments.server_flags}"
    if arguments.start is not None:
        ours = replace(OURS, command=f"{OURS.command} {flags}")
        async with running(ours, arguments.start, _LOG, _START_SECONDS) as server:
            yield server.url
        return
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        path = f"--uds-path={folder / 'shard'}"
        steps = f"--step-seconds={arguments.step_ms / 1000}"
        router = [sys.executable, "-m", "tgi_server.router.cli", f"--tokenizer-name={demo_model.PATH}", *flags.split()]
        router += [f"--master-shard-uds-path={folder / 'shard'}", f"--port={port}", "--hostname=127.0.0.1"]
        with (folder / "log").open("w") as log:
            processes = [
                psutil.Popen(router, stderr=log, stdout=log),
                psutil.Popen([sys.executable, "-m", "tests.fakes.instant_shard", path, steps]),
            ]
            try:
                url = f"http://127.0.0.1:{port}"
                await wait_until_healthy("the router", url, processes[0], folder / "log", _READY_SECONDS)
                yield url
            finally:
                for process in processes:
                    process.terminate()
                    process.wait(30)


async def _run(arguments: argparse.Namespace) -> list[tuple[float, Load]]:
    job = Job(arguments.deadline, arguments.tokens, arguments.words)
    results: list[tuple[float, Load]] = []
    numbers = count(1)
    orders = (("by time", "time"), ("first come", "off")) if arguments.url is None else (("its own", "time"),)
    for order, admission in orders:
        async with _server(arguments, admission) as url:
            most = await capacity(url, job, arguments.batch, arguments.seconds, numbers)
            tell(f"{order}: the capacity is {most:.1f} requests/s")
            for multiple in arguments.load:
                load = Load(order, multiple, multiple * most, arguments.seconds)
                await open_loop(url, job, load, numbers, deadline=admission == "time")
                results.append((most, load))
                print(table(_COLUMNS, [load.row(most)]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--start", type=Path, metavar="MODEL", help="a model folder: starts Oatmill with it")
    server.add_argument("--url", help="of a server that runs; --batch is to be its number of requests in one batch")
    parser.add_argument("--server-flags", default="", metavar="FLAGS", help="for the server")
    parser.add_argument(
        "--load", type=float, nargs="+", default=[0.5, 1, 2, 3], help="multiples of capacity; default: 0.5 1 2 3"
    )
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds for a request (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="that each load lasts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer (default: %(default)s)")
    parser.add_argument("--words", type=int, default=64, help="of a prompt (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="requests in one batch (default: %(default)s)")
    parser.add_argument(
        "--step-ms", type=float, default=25.0, help="of the shard without --start (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    try:
        results = uvloop.run(_run(arguments))
    except (ServerDidNotStart, ServerUnavailable) as error:
        sys.exit(f"error: {error}")
    print(table(_COLUMNS, [load.row(most) for most, load in results]))
    loads = [{"capacity": most, **{name: getattr(load, name) for name in Load.__slots__}} for most, load in results]
    finish(loads, arguments.output)


if __name__ == "__main__":
    main()
