"""Starting a server for a measurement, and stopping it with everything it started."""

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.api import APIS
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.workloads import adapter_name
from shared.addresses import free_port
from shared.control_groups import usable_cores
from tgi_server.gguf.paths import SUFFIX

_PROGRAMS = Path(sys.executable).parent
_STOP_SECONDS = 30
# The tokens that a request may have with its reply where the loads need fewer.
SHORTEST = 2048


class ServerDidNotStart(Exception):
    """The server did not come up. The message says why, as far as its log tells."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server and the command that starts it. command: may hold {model}, {model.name}, {gguf}, {port} and {length}.

    model: a folder or a GGUF file. gguf: that file, or FOLDER-Q4_K_M.gguf. length: tokens of a request with its reply.

    programs: a folder to look for programs in first. environment: variables besides those of this process. api: the
    interface that it is asked by. adapter_flags: are added for loads with adapters, which lie in the folder
    MODEL-adapters; {listed} stands for all NAME=FOLDER with commas between them, {apart} for the same with spaces.
    """

    name: str
    command: str
    environment: Mapping[str, str] = field(default_factory=dict)
    programs: Path = _PROGRAMS
    api: str = "openai"
    adapter_flags: str = ""

    def arguments(self, model: Path, port: int, adapters: int = 0, length: int = SHORTEST) -> list[str]:
        """Raises ValueError for a placeholder that does not exist, and for unbalanced quotes."""
        try:
            arguments = [
                part.format(
                    model=model.resolve(), gguf=gguf_of(model.resolve()), port=port, length=max(SHORTEST, length)
                )
                for part in shlex.split(self.command)
            ]
            if adapters:
                folder = model.resolve().with_name(f"{model.name}-adapters")
                pairs = [f"{name}={folder / name}" for name in map(adapter_name, range(adapters))]
                arguments += self.adapter_flags.format(listed=",".join(pairs), apart=" ".join(pairs)).split()
            return arguments
        except (LookupError, AttributeError, ValueError) as error:
            raise ValueError(
                f"command {self.command!r}: {error}; placeholders are {{model}}, {{gguf}}, {{port}} and {{length}}"
            ) from error


def gguf_of(model: Path) -> Path:
    """Returns the GGUF file of a model: the model itself, or what lies beside its folder."""
    return model if model.suffix == SUFFIX else model.with_name(f"{model.name}-Q4_K_M.gguf")


OURS = ServerCommand(
    "oatmill",
    f"{shlex.quote(sys.executable)} -m tgi_server.launcher.cli "
    "--model-id {model} --port {port} --hostname 127.0.0.1 --dtype bfloat16 --prometheus-port 0",
    adapter_flags="--lora-adapters {listed}",
)
# Servers to compare with.
PEERS = {
    "vllm": ServerCommand(
        "vllm",
        "vllm serve {model} --dtype bfloat16 --max-model-len {length} --host 127.0.0.1 --port {port}",
        {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}", "VLLM_CPU_KVCACHE_SPACE": "4"},
        adapter_flags="--enable-lora --max-loras 8 --max-lora-rank 16 --lora-modules {apart}",
    ),
    "llama.cpp": ServerCommand("llama.cpp", "python -m benchmarks.llama_cpp_server {gguf} {port} --context {length}"),
    "llama-server": ServerCommand(
        "llama-server",
        f"llama-server --model {{gguf}} --threads {usable_cores()} --parallel 32 --ctx-size 65536 "
        "--host 127.0.0.1 --port {port}",
    ),
    "openvino": ServerCommand("openvino", "python -m benchmarks.openvino_server {model}-openvino {port}"),
}


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which server is measured, the same ones for every command."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--url", help="of a running server, such as http://127.0.0.1:8080")
    which.add_argument(
        "--start", type=Path, metavar="MODEL", help="a model folder or a GGUF file, to start servers with"
    )
    parser.add_argument("--server-flags", default="", metavar="FLAGS", help="flags for Oatmill, with --start")
    parser.add_argument(
        "--start-limit", type=float, default=600, help="seconds for a server to get healthy (default: %(default)s)"
    )
    parser.add_argument("--model", help="name of the model in requests; default: the first that the server lists")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")


def started_here(arguments: argparse.Namespace) -> ServerCommand:
    """Returns the command of Oatmill with the flags of `add_server_arguments`."""
    return replace(OURS, command=f"{OURS.command} {arguments.server_flags}")


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name other servers, the same ones for every command."""
    peer = parser.add_argument_group("peers")
    peer.add_argument("--peer", nargs="+", choices=PEERS, default=[], help="servers that this command knows to start")
    peer.add_argument(
        "--peer-command",
        nargs="+",
        default=[],
        metavar="[NAME=]COMMAND",
        help="how to start others, with {model} or {gguf}, {port} and, if need be, {length}; they need a GET /health",
    )
    peer.add_argument(
        "--peer-programs",
        nargs="+",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="where to look for the programs of each --peer first, in the same order, and then of each --peer-command",
    )
    peer.add_argument("--peer-env", nargs="+", default=[], metavar="NAME=VALUE", help="environment variables for them")
    peer.add_argument("--peer-api", choices=APIS, default="openai", help="default: %(default)s")


def chosen_peers(arguments: argparse.Namespace) -> list[ServerCommand]:
    """Returns the servers that the flags of `add_peer_arguments` name. Raises ValueError for flags that do not fit."""
    if wrong := [pair for pair in arguments.peer_env if "=" not in pair]:
        raise ValueError(f"--peer-env: {wrong[0]!r} is not NAME=VALUE")
    peers = [PEERS[name] for name in arguments.peer]
    for text in arguments.peer_command:
        named = re.fullmatch(r"(?:([\w.-]+)=)?(.*)", text, re.DOTALL)
        assert named is not None
        peers.append(ServerCommand(named[1] or "peer", named[2]))
    if len(arguments.peer_programs) > len(peers):
        raise ValueError("--peer-programs: there are more folders than servers after --peer and --peer-command")
    for place, folder in enumerate(arguments.peer_programs):
        peers[place] = replace(peers[place], programs=folder.resolve())
    names = [OURS.name, *(peer.name for peer in peers)]
    if len(set(names)) < len(names):
        raise ValueError(f"the servers need names of their own, by NAME=COMMAND; they are {', '.join(names)}")
    added = dict(pair.split("=", 1) for pair in arguments.peer_env)
    return [replace(peer, environment={**peer.environment, **added}, api=arguments.peer_api) for peer in peers]


@dataclass(frozen=True, slots=True)
class RunningServer:
    """start_seconds: from the command to the first healthy answer. group: of its processes, for signals."""

    url: str
    start_seconds: float
    group: int


@asynccontextmanager
async def running(
    command: ServerCommand, model: Path, log: Path, limit: float, adapters: int = 0, length: int = SHORTEST
) -> AsyncIterator[RunningServer]:
    """Runs a server on a free port of this machine while the block runs.

    log: where its output goes. limit: seconds until its `/health` has to answer. adapters: that it has. length: the
    tokens of a request with its reply. SIGTERM cancels the task that is in the block, so that the server ends, too.

    Raises ServerDidNotStart.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with log.open("w") as output:
        process = _start(command, command.arguments(model, port, adapters, length), output.fileno())
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await wait_until_healthy(command.name, url, process, log, limit)
        yield RunningServer(url, time.perf_counter() - started, process.pid)
    finally:
        await asyncio.to_thread(_stop, process)
        loop.remove_signal_handler(signal.SIGTERM)


def _start(command: ServerCommand, arguments: list[str], output: int) -> "subprocess.Popen[bytes]":
    path = f"{command.programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **command.environment, "PATH": path}
    try:
        return subprocess.Popen(
            arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    except OSError as error:
        raise ServerDidNotStart(f"{command.name} cannot be started: {error}") from error


async def wait_until_healthy(name: str, url: str, process: "subprocess.Popen[bytes]", log: Path, limit: float) -> None:
    """Returns when the server's `/health` answers with 200. Raises ServerDidNotStart after `limit` seconds, or when the
    process ends."""
    connection = Connection(url)
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerDidNotStart(f"{name} ended with status {process.returncode}: {_last_line(log)} (see {log})")
        with contextlib.suppress(ServerUnavailable):
            if (await connection.request("GET", "/health", limit=5)).status == 200:
                connection.close()
                return
        await asyncio.sleep(0.1)
    raise ServerDidNotStart(f"{name} did not get healthy within {limit:g} s (see {log})")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Asks the server to end, and kills whatever of it is left then or does not end in time."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
