"""Measures what chats gain from prefixes on disk after a restart, and from sending them to the replica that knows them.

    python -m benchmarks.chats restart --start MODEL      a long prompt before and after `kill -9`
    python -m benchmarks.chats replicas --start MODEL     chats on two replicas, through llm-functionalities

`restart` sends the same prompt to three servers. The first stores its prefixes on disk and is then killed, the second
starts with these files, and the third starts without files. `--keep FOLDER` keeps the files, and `--parts after` reads
them in a later run.

`replicas` sends chats to one replica (one), to two in turns (blind), to the one of two that knows most of the prompt
(affinity), and to two of which one stops responding after a while (stalled). The cached share is the share of all
prompt tokens that were found in the prefix cache.
"""

import argparse
import asyncio
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc
import uvloop

from benchmarks.api import OpenAi
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.front_service import started
from benchmarks.reply import BadReply, read_reply
from benchmarks.report import finish, number, percentile, table, tell
from benchmarks.serve import first_model
from benchmarks.servers import OURS, RunningServer, ServerCommand, ServerDidNotStart, running
from benchmarks.words import text
from shared.stubs import llm_pb2, llm_pb2_grpc

_LOGS = Path("runs/logs")
_STORE_SECONDS, _ANSWER_SECONDS = 600.0, 1800.0
PARTS = ("before", "after", "without")
POLICIES = ("one", "blind", "affinity", "stalled")


@dataclass(frozen=True, slots=True)
class RestartPart:
    """One server and its prompt. Times in seconds; equal: the answer is that of the first server."""

    part: str
    start: float
    first_token: float
    prompt_tokens: int | None
    cached_tokens: int | None
    equal: bool


@dataclass(slots=True)
class ReplicaRun:
    """Chats under a policy. latencies: seconds of answers. late: calls without an answer at their deadline."""

    policy: str
    latencies: list[float] = field(default_factory=list)
    late: int = 0
    seconds: float = 0.0
    cached_share: float = 0.0


async def measure_restart(arguments: argparse.Namespace) -> list[RestartPart]:
    """Raises ServerDidNotStart, ServerUnavailable, BadReply."""
    prompt = text(Random("restart"), arguments.words)
    results: list[RestartPart] = []
    first = ""
    with tempfile.TemporaryDirectory() as temporary:
        folder = shlex.quote(str(arguments.keep or temporary))
        for part in arguments.parts:
            flags = arguments.server_flags + ("" if part == "without" else f" --prefix-cache-disk 32GiB:{folder}")
            async with _server(arguments.start, flags, part) as server:
                model = await first_model(server.url, None)
                path, body = OpenAi(model).completion(prompt, arguments.new_tokens, stream=True)
                response = await Connection(server.url).request("POST", path, body, _ANSWER_SECONDS)
                reply = read_reply(response)
                first = first or reply.text
                results.append(
                    RestartPart(
                        part,
                        server.start_seconds,
                        reply.token_times[0] - response.started,
                        reply.prompt_tokens,
                        reply.cached_tokens,
                        reply.text == first,
                    )
                )
                tell(f"{part}: first token after {number(results[-1].first_token)} s")
                if part == "before":
                    await _until_stored(server.url, (reply.prompt_tokens or 0) - 64)
                os.killpg(server.group, signal.SIGKILL)
    return results


async def measure_replicas(arguments: argparse.Namespace) -> list[ReplicaRun]:
    """Raises ServerDidNotStart, ServerUnavailable."""
    runs = []
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(_server(arguments.start, arguments.server_flags, f"replica-{index}"))
            for index in range(2)
        ]
        for policy in arguments.policies:
            runs.append(await _run_policy(policy, servers, arguments))
            tell(f"{policy}: {number(runs[-1].seconds)} s, {runs[-1].cached_share:.1%} cached")
    return runs


async def _run_policy(policy: str, servers: list[RunningServer], arguments: argparse.Namespace) -> ReplicaRun:
    urls = [server.url for server in servers]
    fronts = [[urls[0]]] if policy == "one" else [[url] for url in urls] if policy == "blind" else [urls]
    run = ReplicaRun(policy)
    with ExitStack() as stack:
        ports = [stack.enter_context(_front(endpoints)) for endpoints in fronts]
        before = await _lookups(urls)
        began = time.perf_counter()
        stalling = None
        if policy == "stalled":
            stack.callback(os.killpg, servers[1].group, signal.SIGCONT)
            stalling = asyncio.create_task(_stall(run, arguments, servers[1]))
        await _chat(run, ports, arguments)
        run.seconds = time.perf_counter() - began
        if stalling is not None:
            stalling.cancel()
    looked_up, hits = (after - past for past, after in zip(before, await _lookups(urls), strict=True))
    run.cached_share = hits / looked_up
    return run


@asynccontextmanager
async def _server(model: Path, flags: str, name: str) -> AsyncIterator[RunningServer]:
    command = ServerCommand(name, f"{OURS.command} --prometheus-port 0 {flags}")
    async with running(command, model, _LOGS / f"chats-{name}.log", limit=600) as server:
        yield server


@contextmanager
def _front(endpoints: Sequence[str]) -> Iterator[int]:
    """Runs llm-functionalities with these endpoints. Gives its port."""
    flags = "--port", "0", "--hedge-after-ms", "p95", "--endpoint", ",".join(endpoints)
    with started("llm_functionalities", *flags) as (_, port):
        yield port


async def _chat(run: ReplicaRun, ports: Sequence[int], arguments: argparse.Namespace) -> None:
    """Lets all users have their chats, one after the other; each call goes to the next port in turn."""
    chats = iter(range(arguments.chats))
    calls = 0

    async def user(stubs: list[llm_pb2_grpc.LLMRunnerStub]) -> None:
        nonlocal calls
        for chat in chats:
            random = Random(f"{run.policy} {arguments.seed} {chat}")
            said = text(random, arguments.words)
            for _ in range(arguments.turns):
                said += f"\nUser: {text(random, arguments.turn_words)}\nAssistant:"
                stub = stubs[calls % len(stubs)]
                calls += 1
                said += await _answer(run, stub, said, arguments)

    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) for port in ports]
        stubs = [llm_pb2_grpc.LLMRunnerStub(channel) for channel in channels]
        await asyncio.gather(*(user(stubs) for _ in range(arguments.users)))


async def _answer(run: ReplicaRun, stub: llm_pb2_grpc.LLMRunnerStub, prompt: str, arguments: argparse.Namespace) -> str:
    milliseconds = round(arguments.deadline * 1000)
    request = llm_pb2.ModelRequest(formatted_prompt=prompt, max_tokens=arguments.new_tokens, timeout=milliseconds)
    began = time.perf_counter()
    response = await stub.call_model(request)
    if response.text or response.finish_reason:
        run.latencies.append(time.perf_counter() - began)
    else:
        run.late += 1
    return str(response.text)


async def _stall(run: ReplicaRun, arguments: argparse.Namespace, server: RunningServer) -> None:
    """Lets a replica stand still once a third of all calls are answered."""
    while len(run.latencies) < arguments.chats * arguments.turns // 3:  # noqa: ASYNC110  # answers have no event
        await asyncio.sleep(0.01)
    os.killpg(server.group, signal.SIGSTOP)


async def _metric(url: str, name: str) -> float:
    """Returns the sum of a metric over its labels."""
    connection = Connection(url)
    lines = (await connection.request("GET", "/metrics", limit=10)).body.decode().splitlines()
    connection.close()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


async def _lookups(urls: Sequence[str]) -> tuple[float, float]:
    """Returns the prompt tokens of all servers, and how many of them were cached."""
    names = "tgi_prefix_cache_lookup_tokens", "tgi_prefix_cache_hit_tokens"
    looked_up, hits = [sum([await _metric(url, f"{name}_total") for url in urls]) for name in names]
    return looked_up, hits


async def _until_stored(url: str, tokens: int) -> None:
    """Raises ServerUnavailable if a prompt is not on disk in time."""
    deadline = time.perf_counter() + _STORE_SECONDS
    while await _metric(url, "tgi_prefix_disk_stored_tokens_total") < tokens:
        if time.perf_counter() > deadline:
            raise ServerUnavailable(f"{tokens} tokens were not stored within {_STORE_SECONDS:g} s")
        await asyncio.sleep(0.1)


def _restart_table(results: Sequence[RestartPart]) -> str:
    columns = ("server", "start, s", "first token, s", "prompt tokens", "cached", "same answer")
    rows = [
        [
            *(each.part, number(each.start), number(each.first_token), str(each.prompt_tokens)),
            *(str(each.cached_tokens), "yes" if each.equal else "no"),
        ]
        for each in results
    ]
    return table(columns, rows)


def _replica_table(runs: Sequence[ReplicaRun]) -> str:
    columns = ("replicas", "answers", "late", "answers/s", "cached share", "latency p50, s", "p99, s")
    rows = [
        [
            *(run.policy, str(len(run.latencies)), str(run.late), number(len(run.latencies) / run.seconds)),
            f"{run.cached_share:.1%}",
            *(number(percentile(run.latencies, percent)) for percent in (50, 99)),
        ]
        for run in runs
    ]
    return table(columns, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    restart = commands.add_parser("restart", help="a long prompt before and after `kill -9`")
    restart.add_argument("--words", type=int, default=6000, help="of the prompt (default: %(default)s)")
    restart.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    restart.add_argument("--keep", type=Path, metavar="FOLDER", help="for the files; default: one that is deleted")
    replicas = commands.add_parser("replicas", help="chats on two replicas, through llm-functionalities")
    replicas.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: all")
    for flag, default, meaning in (
        ("--chats", 40, "number of chats"),
        ("--turns", 5, "turns of a chat"),
        ("--users", 8, "chats at a time"),
        ("--words", 200, "words of a chat before its first turn"),
        ("--turn-words", 60, "words of a turn"),
        ("--deadline", 60, "seconds for a call"),
        ("--seed", 0, "another seed, other prompts"),
    ):
        replicas.add_argument(flag, type=int, default=default, help=f"{meaning} (default: %(default)s)")
    for command in (restart, replicas):
        command.add_argument("--start", type=Path, required=True, metavar="MODEL", help="a model folder or a GGUF file")
        command.add_argument("--server-flags", default="", metavar="FLAGS", help="for the servers")
        command.add_argument("--new-tokens", type=int, default=32, help="of an answer (default: %(default)s)")
        command.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    results: Sequence[RestartPart | ReplicaRun]
    try:
        if arguments.command == "restart":
            results = parts = uvloop.run(measure_restart(arguments))
            print(_restart_table(parts), "\n")
        else:
            results = runs = uvloop.run(measure_replicas(arguments))
            print(_replica_table(runs), "\n")
    except (ServerDidNotStart, ServerUnavailable, BadReply) as error:
        sys.exit(f"error: {error}")
    finish({arguments.command: results}, arguments.output)


if __name__ == "__main__":
    main()
