"""Measures the router alone, in front of a shard that answers at once.

    python -m benchmarks.router

The router has one core for itself; the load and the shard share another. Both of the router's promises are measured:
requests/s of 10 tokens from 40 users, and tokens/s over 256 streams. Each is measured `--repeat` times after a warm-up.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop

from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.report import number, table
from tgi_server import demo_model

_READY_SECONDS = 60.0
_USERS, _TOKENS, _REQUESTS = 40, 10, 6_000
_STREAMS, _STREAM_TOKENS = 256, 256
_PROMPT = "Tell me how to cook rice so that it does not stick to the pan, please."


@dataclass(frozen=True, slots=True)
class Measurement:
    """rate: requests/s or tokens/s, the median of all runs. *_cpu: shares of one core."""

    name: str
    unit: str
    rate: float
    slowest: float
    fastest: float
    target: float
    router_cpu: float
    load_cpu: float
    shard_cpu: float


class _Rig:
    """The processes, and the requests that are sent to them."""

    def __init__(self, url: str, router: psutil.Process, shard: psutil.Process) -> None:
        self.url = url
        self._router = router
        self._shard = shard

    async def measure(
        self, name: str, unit: str, target: float, repeat: int, run: Callable[[], Awaitable[float]]
    ) -> Measurement:
        """`run` does all its work once, and gives the amount of it."""
        await run()
        rates: list[float] = []
        processes = (self._router, psutil.Process(), self._shard)
        before, started = [_cpu_seconds(process) for process in processes], time.perf_counter()
        for _ in range(repeat):
            begun = time.perf_counter()
            amount = await run()
            rates.append(amount / (time.perf_counter() - begun))
        seconds = time.perf_counter() - started
        shares = [(_cpu_seconds(each) - used) / seconds for each, used in zip(processes, before, strict=True)]
        return Measurement(name, unit, statistics.median(rates), min(rates), max(rates), target, *shares)

    async def requests(self) -> float:
        """40 users, one request after the other, answers in one piece."""
        body = _body(_TOKENS)
        left = iter(range(_REQUESTS))

        async def user() -> None:
            connection = Connection(self.url)
            for _ in left:
                response = await connection.request("POST", "/generate", body)
                if response.headers.get("x-generated-tokens") != str(_TOKENS):
                    raise ServerUnavailable(f"status {response.status}: {response.body[:200]!r}")
            connection.close()

        await asyncio.gather(*(user() for _ in range(_USERS)))
        return _REQUESTS

    async def streams(self) -> float:
        """256 streams at once."""
        body = _body(_STREAM_TOKENS)

        async def stream() -> int:
            connection = Connection(self.url)
            response = await connection.request("POST", "/generate_stream", body)
            connection.close()
            return response.body.count(b"data:")

        tokens = await asyncio.gather(*(stream() for _ in range(_STREAMS)))
        if sum(tokens) != _STREAMS * _STREAM_TOKENS:
            raise ServerUnavailable(f"{sum(tokens)} events came, not {_STREAMS * _STREAM_TOKENS}")
        return sum(tokens)


def _body(tokens: int) -> bytes:
    return json.dumps({"inputs": _PROMPT, "parameters": {"max_new_tokens": tokens, "ignore_eos": True}}).encode()


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def _rig(router_core: int, load_core: int, port: int) -> Iterator[_Rig]:
    os.sched_setaffinity(0, {load_core})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard"
        log = (Path(folder) / "router.log").open("w")
        shard = subprocess.Popen([sys.executable, "-m", "benchmarks.instant_shard", f"--uds-path={path}"])
        router = subprocess.Popen(
            [
                *("taskset", "-c", str(router_core), sys.executable, "-m", "tgi_server.router.cli"),
                *(f"--tokenizer-name={demo_model.PATH}", f"--master-shard-uds-path={path}", f"--port={port}"),
                *("--hostname=127.0.0.1", "--prometheus-port=0", "--max-concurrent-requests=512"),
            ],
            stderr=log,
        )
        try:
            yield _Rig(f"http://127.0.0.1:{port}", psutil.Process(router.pid), psutil.Process(shard.pid))
        finally:
            for process in (router, shard):
                process.send_signal(signal.SIGTERM)
                process.wait(30)


async def _measure(rig: _Rig, repeat: int) -> list[Measurement]:
    await _until_ready(rig.url)
    return [
        await rig.measure("requests, 10 tokens, 40 users", "requests/s", 1_500, repeat, rig.requests),
        await rig.measure("SSE tokens, 256 streams", "tokens/s", 15_000, repeat, rig.streams),
    ]


async def _until_ready(url: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        connection = Connection(url)
        try:
            if (await connection.request("GET", "/health", limit=5)).status == 200:
                return
        except ServerUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
        finally:
            connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="measured runs of each (default: %(default)s)")
    parser.add_argument("--router-core", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--load-core", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--port", type=int, default=18_080, help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        with _rig(arguments.router_core, arguments.load_core, arguments.port) as rig:
            measured = uvloop.run(_measure(rig, arguments.repeat))
    except ServerUnavailable as error:
        sys.exit(f"error: {error}")
    columns = ("measured", "rate", "slowest", "fastest", "target", "router CPU", "load CPU", "shard CPU")
    print(table(columns, [_row(each) for each in measured]))
    print(json.dumps([asdict(each) for each in measured]))


def _row(measured: Measurement) -> list[str]:
    rates = (measured.rate, measured.slowest, measured.fastest, measured.target)
    shares = (measured.router_cpu, measured.load_cpu, measured.shard_cpu)
    return [
        measured.name,
        f"{number(rates[0])} {measured.unit}",
        *map(number, rates[1:]),
        *(f"{share:.0%}" for share in shares),
    ]


if __name__ == "__main__":
    main()
