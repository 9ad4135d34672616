"""Two replicas on a Ray cluster of this machine, with an API key; each of the ways in which one can die, under load.

Ray comes from the package index, into an environment of its own.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import FreePort
from tests.integration.router.foreign_clients.environments import Environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[3] / "deploy" / "ray_serve.py"
MARK = "RAY_SERVE_TEST"
BATCH, CLIENTS = 3, 8
START_SECONDS, REPLACE_SECONDS, LOAD_SECONDS = 240, 120, 3
KEY = "ray-s3cret"
LIMIT = 100_000
BODY = {"inputs": "### Instruction:\nHow long do I boil an egg?\n\n### Response:\n"}


# What Ray does with the script's classes and options, on the node that deploys them and on another one.
SEND = """
import sys
import ray, ray_serve
ray.cloudpickle.register_pickle_by_value(ray_serve)
parts = ray_serve.Server, ray_serve.Front, ray_serve.read_options(["--", "--dtype=float32"])
sys.stdout.buffer.write(ray.cloudpickle.dumps(parts))
"""
RECEIVE = """
import sys
from ray import cloudpickle
*_, options = cloudpickle.load(sys.stdin.buffer)
print(*options.command(1))
"""


class Cluster:
    """`deploy/ray_serve.py`, with a Ray of its own. mark: in the environment of every process that belongs to it."""

    def __init__(self, python: Path, port: int, log: Path, *flags: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.mark = uuid.uuid4().hex
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [python, SCRIPT, "--host=127.0.0.1", f"--port={port}", *flags],
                env={**os.environ, "PATH": path, MARK: self.mark, "RAY_USAGE_STATS_ENABLED": "0", "API_KEY": KEY},
                stdout=output,
                stderr=output,
            )

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def processes(self) -> list[psutil.Process]:
        """All that belong to it."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def launchers(self) -> list[psutil.Process]:
        return [process for process in self.processes() if is_launcher(process)]

    def servers(self) -> set[int]:
        """The ids of the launchers that are healthy."""
        return {each.pid for each in self.launchers() if is_healthy(each)}

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            await asyncio.sleep(0.2)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def is_launcher(process: psutil.Process) -> bool:
    try:
        return any(part.endswith("/text-generation-launcher") for part in process.cmdline())
    except psutil.Error:
        return False


def is_healthy(launcher: psutil.Process) -> bool:
    try:
        (port,) = (part.partition("=")[2] for part in launcher.cmdline() if part.startswith("--port="))
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except (httpx.HTTPError, psutil.Error, ValueError):  # one that has just ended has no command line any more
        return False


def client_of(url: str, key: str = KEY) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=120, limits=limits, headers={"Authorization": f"Bearer {key}"})


@dataclass
class Load:
    """Clients that ask one thing after another, half of them for streams. texts: all answers that came whole."""

    url: str
    texts: list[str] = field(default_factory=list)
    # When the request was sent, and what came instead of an answer.
    failures: list[tuple[float, str]] = field(default_factory=list)
    chunks: int = 0
    stopping: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with client_of(self.url) as client:
            tasks = [asyncio.create_task(self._ask(client, streamed=bool(each % 2))) for each in range(CLIENTS)]
            try:
                yield
            finally:
                self.stopping = True
                await asyncio.gather(*tasks)

    async def _ask(self, client: httpx.AsyncClient, *, streamed: bool) -> None:
        body = {**BODY, "parameters": {"max_new_tokens": 60, "ignore_eos": True}}
        while not self.stopping:
            start = time.monotonic()
            try:
                text = await (self._stream(client, body) if streamed else self._generate(client, body))
            except (httpx.HTTPError, LookupError, ValueError) as error:
                self.failures.append((start, f"{type(error).__name__}: {error}"))
            else:
                self.texts.append(text)

    async def _generate(self, client: httpx.AsyncClient, body: dict[str, object]) -> str:
        response = await client.post("/generate", json=body)
        if response.status_code != 200:
            raise ValueError(f"{response.status_code} {response.text}")
        return response.json()["generated_text"]

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, object]) -> str:
        last = ""
        async with client.stream("POST", "/generate_stream", json=body) as response:
            async for data in response.aiter_text():
                self.chunks += 1
                last += data
        *_, event = last.split("data:")
        answer = json.loads(event)
        if "error" in answer:
            raise ValueError(event)
        return answer["generated_text"]


@pytest.fixture(scope="module")
def python(pytestconfig: pytest.Config) -> Path:
    """An interpreter that has Ray."""
    folder = pytestconfig.rootpath / ".pytest_cache" / "client-environments" / "ray"
    folder.parent.mkdir(parents=True, exist_ok=True)
    Environment(folder, ["ray[serve]"])
    return folder / "bin" / "python"


@pytest.fixture
def cluster(python: Path, free_port: FreePort, tmp_path: Path) -> Iterator[Cluster]:
    flags = ("--min-replicas=2", "--max-replicas=2", f"--max-requests={BATCH}", f"--payload-limit={LIMIT}")
    running = Cluster(python, free_port(), tmp_path / "ray.log", *flags, "--client-timeout=5", "--", "--dtype=float32")
    yield running
    if running.process.poll() is None:
        running.stop()
    for left in running.processes():
        left.kill()


def the_launcher(launcher: psutil.Process) -> psutil.Process:
    return launcher


def its_shard(launcher: psutil.Process) -> psutil.Process:
    (shard,) = (child for child in launcher.children() if "tgi_server.shard.cli" in child.cmdline())
    return shard


def its_replica(launcher: psutil.Process) -> psutil.Process:
    parent = launcher.parent()
    assert parent is not None
    return parent


async def test_a_replica_that_dies_takes_no_request_with_it_but_those_in_its_batch(cluster: Cluster) -> None:
    await cluster.wait_until(lambda: "ready on" in cluster.log.read_text(), START_SECONDS)
    await cluster.wait_until(cluster.answers, START_SECONDS)  # Ray's proxy may be a moment behind
    await large_and_slow_bodies_are_refused(cluster)
    await the_key_is_wanted_and_kept_to_itself(cluster)
    await it_is_called_by_any_name(cluster)
    await conversations_stay_with_the_replica_that_knows_them(cluster)
    for victim in (the_launcher, its_shard, its_replica):
        await die_under_load(cluster, victim)
    assert cluster.stop() == 0
    assert not [process.name() for process in cluster.processes()]


async def conversations_stay_with_the_replica_that_knows_them(cluster: Cluster) -> None:
    async with client_of(cluster.url) as client:
        for chat in range(6):
            prompt, known = f"This is conversation {chat}. " + "We talk about rice and tea. " * 40, 0
            for turn in range(4):
                body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
                answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
                usage = answer["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] >= known, f"turn {turn} of chat {chat}"
                known = (usage["prompt_tokens"] - 1) // 128 * 128  # cached tokens are told in steps of 128
                prompt += f"{answer['choices'][0]['text']} And what is next, after turn {turn}?"


async def large_and_slow_bodies_are_refused(cluster: Cluster) -> None:
    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(2 * LIMIT // 1000):
            yield b" " * 1000

    async with client_of(cluster.url) as client:
        for body in (b" " * (LIMIT + 1), unannounced()):
            response = await client.post("/generate", content=body)
            assert (response.status_code, response.json()["error_type"]) == (413, "payload_too_large")
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(cluster.url).port)
    writer.write(b"POST /generate HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\nonly the beginning")
    async with asyncio.timeout(60):
        assert b" 408 " in await reader.readline()
    writer.close()


async def it_is_called_by_any_name(cluster: Cluster) -> None:
    headers = {"Host": "ray.example:8080", "Origin": "http://ray.example:8080"}
    async with client_of(cluster.url) as client:
        assert (await client.post("/generate", json=BODY, headers=headers)).status_code == 200


async def the_key_is_wanted_and_kept_to_itself(cluster: Cluster) -> None:
    for key, status in ((KEY, 200), ("another", 401)):
        async with client_of(cluster.url, key) as client:
            assert (await client.post("/generate", json=BODY)).status_code == status
    assert not [log for log in logs_of(cluster) if KEY in log.read_text(errors="replace")]
    assert not [process for process in cluster.processes() if KEY in " ".join(process.cmdline())]


def logs_of(cluster: Cluster) -> list[Path]:
    """The script's own, and those of Ray."""
    folder = Path("/tmp/ray/session_latest/logs").resolve()
    return [cluster.log, *(log for log in folder.rglob("*.*") if log.is_file())]


@pytest.mark.parametrize(
    ("key", "flags", "reason"),
    [
        ("", [], "API_KEY is set, but empty"),
        (KEY, ["--", f"--api-key={KEY}"], "--api-key can be read by every user of a node"),
        (KEY, ["--", "--api-key", KEY], "--api-key can be read by every user of a node"),
    ],
)
def test_a_key_that_is_empty_or_in_the_open_is_refused(python: Path, key: str, flags: list[str], reason: str) -> None:
    command = [python, SCRIPT, *flags]
    result = subprocess.run(command, env={**os.environ, "API_KEY": key}, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert reason in result.stderr
    assert KEY not in result.stderr


def test_nodes_need_no_clone(python: Path, tmp_path: Path) -> None:
    sent = subprocess.run([python, "-c", SEND], cwd=SCRIPT.parent, stdout=subprocess.PIPE, check=True, timeout=120)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", RECEIVE]
    received = subprocess.run(
        command, cwd=tmp_path, env=environment, input=sent.stdout, stdout=subprocess.PIPE, check=True, timeout=120
    )
    assert b"--dtype=float32" in received.stdout


async def die_under_load(cluster: Cluster, victim: Callable[[psutil.Process], psutil.Process]) -> None:
    await cluster.wait_until(lambda: len(cluster.servers()) == 2, REPLACE_SECONDS)
    before = cluster.servers()
    load = Load(cluster.url)
    async with load.running():
        await cluster.wait_until(lambda: len(load.texts) > CLIENTS, REPLACE_SECONDS)
        victim(psutil.Process(min(before))).kill()
        killed = time.monotonic()
        answered = len(load.texts)
        await cluster.wait_until(lambda: len(cluster.servers() - {min(before)}) == 2, REPLACE_SECONDS)
        await asyncio.sleep(LOAD_SECONDS)
    print(f"\n{victim.__name__} killed: {answered} answers before, {len(load.texts) - answered} after", end="")
    print(f", {len(load.failures)} failed, a new replica after {time.monotonic() - killed - LOAD_SECONDS:.1f} s")
    print("\n".join(reason for _, reason in load.failures))
    assert len(set(load.texts)) == 1
    assert load.chunks > len(load.texts)
    assert len(load.failures) <= BATCH
    assert all(sent < killed for sent, _ in load.failures)
    assert min(before) not in cluster.servers()
