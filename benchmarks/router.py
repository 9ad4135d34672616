"""Measures the router alone, in front of a shard that answers at once.

    python -m benchmarks.router

The router has one core for itself; the load and the shard share another. Both of the router's promises are measured:
requests/s of 10 tokens from 40 users, and tokens/s over 256 streams. Each is measured `--repeat` times after a warm-up.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import uvloop

from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.report import finish_run, number, table
from benchmarks.servers import ServerDidNotStart, wait_until_healthy
from tgi_server import demo_model

_READY_SECONDS = 60.0
_USERS, _TOKENS, _REQUESTS = 40, 10, 6_000
_STREAMS, _STREAM_TOKENS = 256, 256
_PROMPT = "Tell me how to cook rice so that it does not stick to the pan, please."
_COLUMNS = ("measured", "rate", "slowest", "fastest", "target", "router CPU", "load CPU", "shard CPU")


async def requests(url: str) -> int:
    """Sends requests of 40 users, one after the other, whole answers. Returns how many there were."""
    body = _body(_TOKENS)
    left = iter(range(_REQUESTS))

    async def user() -> None:
        with closing(Connection(url)) as connection:
            for _ in left:
                response = await connection.request("POST", "/generate", body)
                if response.headers.get("x-generated-tokens") != str(_TOKENS):
                    raise ServerUnavailable(f"status {response.status}: {response.body[:200]!r}")

    await asyncio.gather(*(user() for _ in range(_USERS)))
    return _REQUESTS


async def streams(url: str) -> int:
    """Opens 256 streams at once. Returns the number of tokens that came."""
    body = _body(_STREAM_TOKENS)

    async def stream() -> int:
        with closing(Connection(url)) as connection:
            response = await connection.request("POST", "/generate_stream", body)
            return response.body.count(b"data:")

    tokens = sum(await asyncio.gather(*(stream() for _ in range(_STREAMS))))
    if tokens != _STREAMS * _STREAM_TOKENS:
        raise ServerUnavailable(f"{tokens} events came, not {_STREAMS * _STREAM_TOKENS}")
    return tokens


LOADS: list[tuple[str, str, float, Callable[[str], Awaitable[int]]]] = [
    ("requests, 10 tokens, 40 users", "requests/s", 1_500, requests),
    ("SSE tokens, 256 streams", "tokens/s", 15_000, streams),
]


async def measure(url: str, processes: list[psutil.Process], repeat: int) -> list[dict[str, object]]:
    """Returns for each load its rates, and what each of the processes took of a core."""
    results: list[dict[str, object]] = []
    for name, unit, target, run in LOADS:
        await run(url)
        rates = []
        before, started = [sum(each.cpu_times()[:2]) for each in processes], time.perf_counter()
        for _ in range(repeat):
            begun = time.perf_counter()
            rates.append(await run(url) / (time.perf_counter() - begun))
        seconds = time.perf_counter() - started
        shares = [(sum(each.cpu_times()[:2]) - used) / seconds for each, used in zip(processes, before, strict=True)]
        results.append({"name": name, "unit": unit, "rates": rates, "target": target, "cpu": shares})
        middle = f"{number(statistics.median(rates))} {unit}"
        cells = [name, middle, *map(number, (min(rates), max(rates), target)), *(f"{share:.0%}" for share in shares)]
        print(table(_COLUMNS, [cells]), flush=True)
    return results


def _body(tokens: int) -> bytes:
    return json.dumps({"inputs": _PROMPT, "parameters": {"max_new_tokens": tokens, "ignore_eos": True}}).encode()


@contextmanager
def _processes(router_core: int, load_core: int, port: int, folder: Path) -> Iterator[list[psutil.Popen]]:
    """Runs the router and the shard; this process moves to the shard's core."""
    os.sched_setaffinity(0, {load_core})
    path = folder / "shard"
    router = ("taskset", "-c", str(router_core), sys.executable, "-m", "tgi_server.router.cli")
    flags = (f"--tokenizer-name={demo_model.PATH}", f"--master-shard-uds-path={path}", f"--port={port}")
    limits = ("--hostname=127.0.0.1", "--prometheus-port=0", "--max-concurrent-requests=512")
    with (folder / "router.log").open("w") as log:
        processes = [
            psutil.Popen([*router, *flags, *limits], stderr=log),
            psutil.Popen([sys.executable, "-m", "tests.fakes.instant_shard", f"--uds-path={path}"]),
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.terminate()
                process.wait(30)


async def _run(arguments: argparse.Namespace) -> list[dict[str, object]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        _processes(arguments.router_core, arguments.load_core, arguments.port, Path(folder)) as (router, shard),
    ):
        url = f"http://127.0.0.1:{arguments.port}"
        await wait_until_healthy("the router", url, router, Path(folder) / "router.log", _READY_SECONDS)
        return await measure(url, [router, psutil.Process(), shard], arguments.repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="measured runs of each (default: %(default)s)")
    parser.add_argument("--router-core", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--load-core", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--port", type=int, default=18_080, help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    finish_run(lambda arguments: uvloop.run(_run(arguments)), arguments, ServerDidNotStart, ServerUnavailable)


if __name__ == "__main__":
    main()
