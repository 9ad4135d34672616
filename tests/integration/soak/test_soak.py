"""Both services under mixed load for ten minutes: no request fails by another's fault, and no resource leaks.

make test ARGS="--runslow -n 0 -s -k test_soak"                     as long as it takes
make test ARGS="--runslow -n 0 -s -k test_soak --soak-minutes 1"   shorter
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.conftest import FreePort, ServerFactory
from tests.integration.llm_functionalities.faults import priority
from tests.integration.llm_functionalities.service import Service, running_service
from tests.integration.soak.flapping_proxy import FlappingProxy
from tests.integration.soak.front_load import DEFAULT_SECONDS, SLACK_SECONDS, Report
from tests.integration.soak.holdings import (
    grown,
    held_by_front,
    held_by_router,
    idle,
    places_of_the_front,
    places_of_the_server,
    wait_for,
)
from tests.integration.soak.http_load import HttpLoad
from tests.integration.soak.tally import Tally
from tests.integration.soak.turns import turns_until
from tests.integration.soak.vitals import Vitals, table, vitals
from tests.servers import TextGenerationServer
from tgi_server import demo_model

# The time limit is for an hour of load.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 + 1200)]

WARM_UP_SECONDS = 30.0
# Longer than llm_functionalities keeps idle connections.
IDLE_SECONDS = 4.0
# Places of the text-generation server, and as many threads of llm_functionalities.
PLACES = 32
CALLS = 64
KV_TOKENS = 16_384
# The text-generation server's `--client-timeout`, so that it cuts off slow readers before they leave.
CLIENT_SECONDS = 5
SERVER = (
    *(f"--model-id={demo_model.PATH}", "--dtype=float32", f"--max-concurrent-requests={PLACES}"),
    *(f"--max-batch-total-tokens={KV_TOKENS}", f"--client-timeout={CLIENT_SECONDS}"),
)
FRONT = (
    *("--default-timeout", str(DEFAULT_SECONDS)),
    *("--threads", str(PLACES), "--max-concurrent-calls", str(CALLS)),
)


class Stack:
    """A text-generation server, and llm_functionalities, which reaches it through a proxy."""

    def __init__(self, server: TextGenerationServer, front: Service, proxy: FlappingProxy, metrics_port: int) -> None:
        self.server = server
        self.front = front
        self.proxy = proxy
        self.front_metrics = f"http://127.0.0.1:{metrics_port}/metrics"

    def vitals(self) -> dict[str, Vitals]:
        server = {role: self.server.child(role) for role in ("router", "shard")}
        launcher = psutil.Process(self.server.process.pid)
        return vitals({"launcher": launcher, **server, "llm_functionalities": psutil.Process(self.front.process.pid)})

    def held(self) -> dict[str, float]:
        """Places, KV blocks and memory that requests have."""
        return held_by_router(self.server.url) | held_by_front(self.front_metrics)


@contextlib.contextmanager
def stack(server: TextGenerationServer, free_port: FreePort) -> Iterator[Stack]:
    proxy, metrics_port = FlappingProxy(free_port(), int(server.url.rpartition(":")[2])), free_port()
    flags = ("--endpoint", f"http://127.0.0.1:{proxy.port}", *FRONT, f"--metrics-port={metrics_port}")
    with contextlib.ExitStack() as running:
        with priority():
            front = running.enter_context(running_service(*flags))
        yield Stack(server, front, proxy, metrics_port)


def start_callers(address: str, seconds: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.integration.soak.front_load", address, str(seconds)]
    with priority():
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def load(stack: Stack, seconds: float) -> tuple[Tally, Report]:
    """Everything at once; afterwards the proxy is well, and no client is connected."""
    callers = start_callers(stack.front.address, seconds)
    http = HttpLoad(stack.server.url)
    await http.begin()
    flapping = asyncio.create_task(stack.proxy.flap())
    try:
        await http.run(turns_until(time.monotonic() + seconds))
        output, _ = await asyncio.to_thread(callers.communicate, timeout=60)
    finally:
        callers.kill()
        callers.wait()
        flapping.cancel()
        await asyncio.gather(flapping, return_exceptions=True)
        await http.close()
    return http.tally, Report(**json.loads(output))


async def settled(stack: Stack) -> None:
    """Waits until nothing runs and idle connections are gone; a call makes llm_functionalities drop its own."""
    await asyncio.to_thread(wait_for, lambda: idle(stack.held()))
    await asyncio.sleep(max(IDLE_SECONDS, CLIENT_SECONDS + 1))
    await places_of_the_front(stack.front.address, 1)
    await asyncio.sleep(1)


async def fill_kv_cache(stack: Stack) -> None:
    """Uses every KV block once, because the system gives a process memory only when it is first written to."""
    words = 500
    async with httpx.AsyncClient(base_url=stack.server.url, timeout=60) as http:
        for turn in range(2 * KV_TOKENS // words // PLACES):
            prompts = [f"{turn} {place} " + "rice " * words for place in range(PLACES)]
            bodies = ({"inputs": prompt, "parameters": {"max_new_tokens": 1}} for prompt in prompts)
            answers = await asyncio.gather(*(http.post("/generate", json=body) for body in bodies))
            assert {answer.status_code for answer in answers} == {200}


async def start_grammar_threads(stack: Stack) -> None:
    """Has as many grammars compiled at once as there are places: the shard starts a thread for each, and keeps it."""
    grammars = ({"type": "regex", "value": f"a{{1,{200 + place}}}"} for place in range(PLACES))
    bodies = ({"inputs": "rice", "parameters": {"max_new_tokens": 1, "grammar": grammar}} for grammar in grammars)
    async with httpx.AsyncClient(base_url=stack.server.url, timeout=60) as http:
        answers = await asyncio.gather(*(http.post("/generate", json=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}


async def each_minute(stack: Stack, curve: list[dict[str, Vitals]]) -> None:
    """Adds the resources of all processes to `curve` every minute, and prints their memory, until it is cancelled."""
    while True:
        curve.append(await asyncio.to_thread(stack.vitals))
        print(len(curve) - 1, "min, MiB:", {name: each.resident for name, each in curve[-1].items()}, flush=True)
        await asyncio.sleep(60)


async def test_nobody_is_harmed_and_nothing_is_kept(
    server: ServerFactory, free_port: FreePort, pytestconfig: pytest.Config
) -> None:
    seconds = 60 * float(pytestconfig.getoption("--soak-minutes"))
    with stack(server(*SERVER).wait_until_ready(), free_port) as running:
        await running.proxy.start()
        await load(running, min(WARM_UP_SECONDS, seconds / 2))
        await fill_kv_cache(running)
        await start_grammar_threads(running)
        await places_of_the_front(running.front.address, CALLS)
        await settled(running)
        before = await asyncio.to_thread(running.vitals)
        running.proxy.faults.clear()
        curve: list[dict[str, Vitals]] = []
        watching = asyncio.create_task(each_minute(running, curve))
        tally, report = await load(running, seconds)
        watching.cancel()
        await settled(running)
        await asyncio.to_thread(wait_for, lambda: not grown(before, running.vitals()))
        after, held = await asyncio.to_thread(running.vitals), await asyncio.to_thread(running.held)
        places = (
            await places_of_the_server(running.server.url, PLACES),
            await places_of_the_front(running.front.address, CALLS),
        )
        await running.proxy.stop()
        front = Tally()
        for kind, outcomes in report.outcomes.items():
            front.outcomes[kind].update(outcomes)
        print(f"\n{seconds:.0f} s\n\n{tally.table()}\n\n{front.table()}\n\n{table(before, after)}\n")
        print(f"faults of the way: {dict(running.proxy.faults)}; held: {held}; places: {places}")
        print(f"calls: {report.calls}, later than 50 ms: {report.late}, worst: {report.worst * 1000:.0f} ms, ")
        print(f"latest: {report.latest}")
        print(f"less delays: {report.worst_but_delays * 1000:.0f} ms, idle thread: {report.worst_delay * 1000:.0f} ms")
    assert tally.wrong == report.wrong == []
    assert report.worst_but_delays < SLACK_SECONDS, report
    assert idle(held), held
    assert places == ({200: PLACES}, {"answered": CALLS})
    assert not grown(before, after)
