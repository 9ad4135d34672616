"""A router with everything but a model: real HTTP, real gRPC, and a shard whose text the test decides."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.browser import ARGUMENTS, CHROMIUM, opened
from tests.conftest import FreePort
from tests.fakes.instant_shard import InstantShard
from tests.fakes.instant_shard import start as start_shard
from tests.integration.router.process import Process, Start
from tests.logs import assert_no_traceback
from tests.timing import SECONDS
from tgi_server import demo_model
from tgi_server.router.api.app import create_app
from tgi_server.router.api.connections import Connections, connection_limits
from tgi_server.router.api.server import HttpServer
from tgi_server.router.service import Service
from tgi_server.router.settings import RouterSettings
from tgi_server.router.startup import access_rules, assembled

EOS = 1


@dataclass(slots=True)
class Router:
    """A running router. http: a client of it. connections: of all its clients."""

    url: str
    shard: InstantShard
    service: Service
    http: httpx.AsyncClient
    connections: Connections

    def say(self, text: str, *, end: bool = True) -> int:
        """Makes `text` what every request gets; returns how many tokens that is, with the one that ends it."""
        ids = self.service.text.tokenizer.encode(text, add_special_tokens=False).ids
        self.shard.tokens = [*ids, EOS] if end else ids
        return len(self.shard.tokens)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def metric(self, series: str) -> float:
        """The value of one series; 0 when it is not there yet."""
        text = (await self.http.get("/metrics")).text
        return next((float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{series} ")), 0.0)

    async def until(self, condition: Callable[[], Any], seconds: float = SECONDS) -> None:
        """Waits for `condition`, plain or a coroutine, to be true."""
        async with asyncio.timeout(seconds):
            while True:
                result = condition()
                if await result if asyncio.iscoroutine(result) else result:
                    return
                await asyncio.sleep(0.01)

    async def idle(self) -> None:
        """Waits until no request runs."""

        async def no_batch() -> bool:
            return await self.metric("tgi_batch_current_size") == 0 and self.service.capacity.in_flight == 0

        await self.until(no_batch)

    async def leave(self, path: str, **body: Any) -> None:
        """Asks for something and closes the connection once it is being generated."""
        asking = asyncio.create_task(self.post(path, **body))

        async def one_in_batch() -> bool:
            return await self.metric("tgi_batch_current_size") == 1

        await self.until(one_in_batch)
        asking.cancel()


RouterFactory = Callable[..., Any]


@asynccontextmanager
async def running_router(
    folder: Path, shard_options: dict[str, Any], send_buffer: int | None = None, **settings: Any
) -> AsyncIterator[Router]:
    """send_buffer: bytes that the system keeps for each client."""
    path = folder / "shard"
    # Books of the usual number of blocks would take most of the time of a start.
    shard = InstantShard(f"unix://{path}", None, **{"end": EOS, "num_blocks": 2_048, **shard_options})
    shards = await start_shard(shard, path)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    values = {
        "tokenizer_name": demo_model.PATH,
        "master_shard_uds_path": str(path),
        "allowed_hosts": ["*"],  # it listens on loopback
        **settings,
    }
    chosen = RouterSettings.model_validate(values)
    async with assembled(chosen) as service:
        app = create_app(service, access_rules(chosen, listener))
        limits = connection_limits(chosen.max_connections, chosen.max_connections_per_address)
        connections = Connections(*limits, chosen.max_client_memory * 2**20)
        connections.on_broken = service.metrics.connection_broken
        connections.account.on_counted = service.metrics.client_memory
        server = HttpServer(app, grace=1, patience=chosen.client_timeout, connections=connections)
        serving = asyncio.create_task(server.serve([listener]))
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            router = Router(url, shard, service, http, server.open_connections)
            await router.until(lambda: server.started)
            router.say("Rinse the rice. Then boil it.")
            try:
                yield router
            finally:
                # A graceful end takes a fifth of a second, which is for the tests of it.
                serving.cancel()
                await asyncio.wait([serving])
                for each in server.servers:
                    each.close()
    await shards.stop(None)


@pytest.fixture
async def routers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterFactory]:
    """Starts a router with settings of its own: `await routers(api_key="k", shard={"step_seconds": 0.01})`."""
    async with AsyncExitStack() as stack:

        async def make(*, shard: dict[str, Any] | None = None, **settings: Any) -> Router:
            folder = tmp_path_factory.mktemp("router")
            return await stack.enter_async_context(running_router(folder, shard or {}, **settings))

        yield make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """One router for all tests of a file that are marked with `in_one_loop` and leave it as it is."""
    async with running_router(tmp_path_factory.mktemp("router"), {}) as router:
        yield router


in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
async def router(routers: RouterFactory) -> Router:
    made: Router = await routers()
    return made


def events(text: str) -> list[str]:
    """The data of each server-sent event."""
    return [line.removeprefix("data:").strip() for line in text.split("\n\n") if line.startswith("data:")]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts routers; whatever is left of them is killed afterwards."""
    started: list[Process] = []

    def begin(*flags: str, **options: Any) -> Process:
        log = tmp_path / f"router-{len(started)}.log"
        started.append(Process(log, "--prometheus-port=0", *flags, **options))
        return started[-1]

    yield begin
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
            process.wait()
    for process in started:
        assert_no_traceback(process.log.read_text())


@contextmanager
def shard_process(path: Path, *flags: str) -> Iterator[Path]:
    """A shard in a process of its own, while the context is open; its socket."""
    shard = subprocess.Popen([sys.executable, "-m", "tests.fakes.instant_shard", f"--uds-path={path}", *flags])
    try:
        yield path
    finally:
        shard.send_signal(signal.SIGTERM)
        shard.wait(30)


@pytest.fixture(scope="module")
def shard_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a shard that needs 20 ms for each token."""
    with shard_process(tmp_path_factory.mktemp("shard") / "socket", "--step-seconds=0.02") as path:
        yield path


@pytest.fixture(scope="module")
def patient_shard_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a shard that takes long prompts, and embeds and classifies texts."""
    flags = "--max-total-tokens=131072", f"--encoders={demo_model.PATH}"
    with shard_process(tmp_path_factory.mktemp("shard") / "socket", *flags) as path:
        yield path


@pytest.fixture
def flags(shard_path: Path, free_port: FreePort) -> tuple[str, list[str]]:
    """The URL of a router that can start, and its flags."""
    port = free_port()
    model = f"--tokenizer-name={demo_model.PATH}"
    return f"http://127.0.0.1:{port}", [
        model,
        f"--master-shard-uds-path={shard_path}",
        "--hostname=127.0.0.1",
        f"--port={port}",
    ]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, demo_server: Any) -> Iterator[Any]:
    """The page of a server with the demo model."""
    with opened(browser, demo_server.url) as page:
        yield page
