"""Mixed calls while servers die and restart: each ends in time, whole or empty with a reason, and nothing of it stays.

make test ARGS="--runslow -n 0 -s -k test_conservation --conservation-calls 5000 --conservation-seed 1"

Half of the calls go over gRPC to llm_functionalities in front of two text-generation servers, half to these over HTTP.
The seed decides what each call is, and when it is cancelled.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.adapters import make_adapter
from tests.conftest import FreePort
from tests.image_processors import as_data_url, photograph, save_processor, tokenizer_of
from tests.integration.llm_functionalities.faults import priority
from tests.integration.llm_functionalities.service import Service, running_service
from tests.integration.soak.front_load import DEFAULT_SECONDS, Report
from tests.integration.soak.holdings import (
    grown,
    held_by_front,
    held_by_router,
    idle,
    places_of_the_front,
    places_of_the_server,
    wait_for,
)
from tests.integration.soak.http_load import GOOD, HELLO, REFUSED, Ask, HttpLoad
from tests.integration.soak.tally import Tally
from tests.integration.soak.turns import Turn, turns
from tests.integration.soak.vitals import Vitals, table, vitals
from tests.servers import TextGenerationServer
from tests.tiny_encoders import make_embedder
from tests.tiny_models import make_with_images

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FAMILY = "qwen2_5_vl"
TOKENS = 8_192
PLACES = 32
CALLS = 64
WARM_UP = 120
# Less what the machine delays an answer by. The other processes of this test compute on the same cores.
LATE_SECONDS = 1.0
CLIENT_SECONDS = 5
# Of pools that the warm-up, which is short, need not have filled.
MORE_THREADS = 8
# Longer than the services keep idle connections.
IDLE_SECONDS = CLIENT_SECONDS + 1
# Parts of the calls after which a server goes.
KILLED, RESTARTED = 0.25, 0.6


def _shown(*seeds: int, **fields: Any) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": as_data_url(photograph(60, 90, seed))}} for seed in seeds]
    return {"messages": [{"role": "user", "content": [*images, {"type": "text", "text": "What?"}]}], **fields}


def _adapted(name: str) -> dict[str, Any]:
    return {"inputs": "Hello", "parameters": {"max_new_tokens": 30, "adapter_id": name}}


QUESTIONS = [{"name": str(number), "type": "predicate", "instructions": "It is sweet."} for number in range(4)]
ASKS = GOOD | {
    **{
        f"images, {seeds}": Ask("/v1/chat/completions", _shown(*seeds, max_tokens=20))
        for seeds in ((0,), (1,), (2, 3), (0, 4))
    },
    "images, stream": Ask("/v1/chat/completions", _shown(5, max_tokens=40, stream=True)),
    "bad: image": Ask(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
        REFUSED,
    ),
    "adapter": Ask("/generate", _adapted("chef")),
    "adapter, stream": Ask("/generate_stream", _adapted("chef")),
    "bad: adapter": Ask("/generate", _adapted("none"), REFUSED | {404, 424}),
    "embed": Ask("/embed", {"inputs": ["Boil the eggs."] * 8}),
    "decisions": Ask("/v1/decisions", {"input": HELLO[0]["content"], "questions": QUESTIONS}),
}


class Endpoint:
    """A text-generation server that comes back on the same port. load: the requests of its HTTP clients."""

    def __init__(self, port: int, folder: Path, name: str, flags: tuple[str, ...]) -> None:
        self.name = name
        self._start = lambda: TextGenerationServer(port, folder / f"{name}.log", *flags)
        self.server = self._start().wait_until_ready()
        self.url = self.server.url
        self.load = HttpLoad(self.url, ASKS)
        self._due = asyncio.Event()

    def turns(self, given: Iterator[Turn], due: int) -> Iterator[Turn]:
        """Yields what is given. After so many turns the server's end is due."""
        for number, turn in enumerate(given):
            if number == due:
                self._due.set()
            yield turn

    async def restart(self, end: Callable[[], Awaitable[None]]) -> None:
        """Ends the server when this is due, and restarts it."""
        await self._due.wait()
        self.load.there.clear()
        await end()
        self.server = await asyncio.to_thread(lambda: self._start().wait_until_ready())
        self.load.there.set()

    async def kill_shard(self) -> None:
        self.server.child("shard").kill()
        assert await asyncio.to_thread(self.server.wait) != 0

    async def stop(self) -> None:
        assert await asyncio.to_thread(self.server.stop) == 0

    def vitals(self) -> dict[str, Vitals]:
        roots = {role: self.server.child(role) for role in ("router", "shard")}
        found = vitals({"launcher": psutil.Process(self.server.process.pid), **roots})
        return {f"{self.name}: {name}": each for name, each in found.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a server whose model reads images, with an adapter, beside a model that embeds."""
    root = tmp_path_factory.mktemp("models")
    text = {"vocab_size": tokenizer_of(FAMILY).get_vocab_size(), "max_position_embeddings": TOKENS}
    folder = make_with_images(FAMILY, root / "model", torch.float32, text)
    save_processor(FAMILY, folder)
    adapted = AutoModelForImageTextToText.from_pretrained(folder)
    make_adapter(adapted, root / "chef", r=4, target_modules=r".*language_model.*(q_proj|down_proj)")
    embedder = make_embedder("bert", root / "embedder")
    return (
        *(f"--model-id={folder}", "--dtype=float32", f"--lora-adapters=chef={root / 'chef'}"),
        *(f"--embedding-model-id={embedder}", f"--max-concurrent-requests={PLACES}"),
        *(f"--max-batch-total-tokens={TOKENS}", f"--client-timeout={CLIENT_SECONDS}"),
    )


@asynccontextmanager
async def calling(front: Service, calls: int, seed: int) -> AsyncIterator[list[Report]]:
    """Makes calls of the front in a process of its own while the context is open. Adds the report at its end."""
    command = [sys.executable, "-m", "tests.integration.soak.front_load", front.address, str(calls), str(seed)]
    with priority():
        callers = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    reports: list[Report] = []
    try:
        yield reports
        output, _ = await callers.communicate()
        reports.append(Report(**json.loads(output)))
    finally:
        if callers.returncode is None:
            callers.kill()
            await callers.wait()


async def load(endpoints: list[Endpoint], front: Service, calls: int, seed: int, *, faults: bool) -> Report:
    """Makes so many calls. faults: a shard of the first server is killed meanwhile, and the second one restarted."""
    each = calls // 4
    first, second = endpoints

    async def restart() -> None:
        if faults:
            await first.restart(first.kill_shard)
            await second.restart(second.stop)

    async with calling(front, calls - 2 * each, seed) as reports:
        loads = [
            endpoint.load.run(endpoint.turns(turns(each, seed + number), int(due * each) if faults else each))
            for number, (endpoint, due) in enumerate(zip(endpoints, (KILLED, RESTARTED), strict=True), 1)
        ]
        await asyncio.gather(*loads, restart())
    return reports[0]


async def start_decoders(url: str) -> None:
    """Has the router start all processes that decode images, which it does as images come together."""
    async with httpx.AsyncClient(timeout=120) as http:
        bodies = [_shown(seed, max_tokens=1) for seed in range(10, 26)]
        answers = await asyncio.gather(*(http.post(f"{url}/v1/chat/completions", json=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}


async def every_block(url: str) -> int:
    """Returns the status of a request that needs every KV block."""
    body = {"inputs": "rice " * TOKENS, "parameters": {"truncate": TOKENS - 2, "max_new_tokens": 1}}
    async with httpx.AsyncClient(timeout=120) as http:
        return (await http.post(f"{url}/generate", json=body)).status_code


async def test_every_call_ends_and_nothing_of_it_stays(
    model: tuple[str, ...], free_port: FreePort, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    calls, seed = (int(pytestconfig.getoption(f"--conservation-{name}")) for name in ("calls", "seed"))
    seed = seed or time.time_ns() % 2**31
    print(f"\n{calls} calls; to repeat it: --conservation-calls {calls} --conservation-seed {seed}")
    endpoints = [Endpoint(free_port(), tmp_path, name, model) for name in ("first", "second")]
    metrics = free_port()
    flags = (
        *("--endpoint", ",".join(endpoint.url for endpoint in endpoints), f"--metrics-port={metrics}"),
        *("--default-timeout", str(DEFAULT_SECONDS), "--threads", str(PLACES), "--max-concurrent-calls", str(CALLS)),
    )
    with contextlib.ExitStack() as running:
        with priority():
            front = running.enter_context(running_service(*flags))

        def seen() -> dict[str, Vitals]:
            found = vitals({"llm_functionalities": psutil.Process(front.process.pid)})
            return found | endpoints[0].vitals() | endpoints[1].vitals()

        def held() -> dict[str, dict[str, float]]:
            holding = {endpoint.name: held_by_router(endpoint.url) for endpoint in endpoints}
            return holding | {"front": held_by_front(f"http://127.0.0.1:{metrics}/metrics")}

        async def settled() -> None:
            for endpoint in endpoints:
                await start_decoders(endpoint.url)
            await asyncio.to_thread(wait_for, lambda: all(map(idle, held().values())))
            await asyncio.sleep(IDLE_SECONDS)
            await places_of_the_front(front.address, 1)
            await asyncio.sleep(1)

        def info() -> list[Any]:
            return [httpx.get(f"{endpoint.url}/info", timeout=30).json() for endpoint in endpoints]

        for endpoint in endpoints:
            await endpoint.load.begin()
        await load(endpoints, front, WARM_UP, seed, faults=False)
        await places_of_the_front(front.address, CALLS)
        await settled()
        before, described = await asyncio.to_thread(seen), info()
        tallies = [Tally(), Tally()]
        for endpoint, tally in zip(endpoints, tallies, strict=True):
            endpoint.load.tally = tally
        report = await load(endpoints, front, calls, seed, faults=True)
        await settled()
        await asyncio.to_thread(wait_for, lambda: not grown(before, seen(), MORE_THREADS))
        after, holding = await asyncio.to_thread(seen), await asyncio.to_thread(held)
        blocks = [await every_block(endpoint.url) for endpoint in endpoints]
        places = [await places_of_the_server(endpoint.url, PLACES) for endpoint in endpoints]
        front_places = await places_of_the_front(front.address, CALLS)
        for endpoint in endpoints:
            await endpoint.load.close()
        for endpoint, tally in zip(endpoints, tallies, strict=True):
            print(f"\n{endpoint.name}:\n{tally.table()}")
        print("\nfront:\n" + "\n".join(f"{kind}: {outcomes}" for kind, outcomes in sorted(report.outcomes.items())))
        print(f"\n{table(before, after)}\nheld: {holding}; places: {places}, {front_places}; every block: {blocks}")
        print(f"less delays, the latest came {report.worst_but_delays * 1000:.0f} ms late; {report.latest}")
        described_after = info()
    for endpoint in endpoints:
        await endpoint.stop()
    assert [*report.wrong, *tallies[0].wrong, *tallies[1].wrong] == []
    assert report.worst_but_delays < LATE_SECONDS, report
    assert all(map(idle, holding.values())), holding
    assert blocks == [200, 200]
    assert (places, front_places) == ([{200: PLACES}] * 2, {"answered": CALLS})
    assert not grown(before, after, MORE_THREADS)
    assert described == described_after
