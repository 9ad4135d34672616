"""Measures a model that sleeps and wakes: the time of both, the first token after it, and the memory of the shards.

    python -m benchmarks.sleep --start MODEL               starts Oatmill, and stops it in the end
    python -m benchmarks.sleep --url http://127.0.0.1:8080  a running server with --enable-sleep-mode

Each round asks a prompt of a few words and one of `--words` words, first from a model that is awake, then each from one
that sleeps; the request wakes it. A server that stores prefixes on disk (`--prefix-cache-disk`) finds the long prompt
there, which the column `cached` shows. `cold`: the files of weights and prefixes had to come from the disk: the cache
of the system was emptied, which needs root.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from urllib.parse import urlsplit

import psutil
import uvloop

from benchmarks.api import OpenAi
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.reply import BadReply, read_reply
from benchmarks.report import finish, number, table, tell
from benchmarks.serve import first_model
from benchmarks.servers import OURS, ServerCommand, ServerDidNotStart, running
from benchmarks.words import text

_LOG = Path("runs/logs/sleep.log")
_SECONDS = 600.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Waking:
    """One request. state: of the model before it. Times in seconds; sleep: None if it was awake. memory: bytes that the
    shards held before it. equal: the answer is that of the model when it was awake.
    """

    prompt: str
    state: str
    sleep: float | None
    memory: int
    first_token: float
    prompt_tokens: int | None
    cached_tokens: int | None
    equal: bool


class Meter:
    """Asks one server, and looks at its shards."""

    def __init__(self, url: str, model: str, new_tokens: int) -> None:
        self._url = url
        self._api = OpenAi(model)
        self._new_tokens = new_tokens
        self._shards = list(_shards(url))
        self._expected: dict[str, str] = {}

    async def ask(self, name: str, prompt: str, state: str) -> Waking:
        """Raises ServerUnavailable, BadReply."""
        with closing(Connection(self._url)) as connection:
            seconds = None
            if state != "awake":
                began = time.perf_counter()
                response = await connection.request("POST", "/sleep", limit=_SECONDS)
                seconds = time.perf_counter() - began
                if response.status != 200:
                    raise BadReply(f"/sleep: {response.body[:300].decode(errors='replace')}")
            if state == "cold":
                await asyncio.to_thread(_empty_cache)
            memory = sum(_resident_bytes(shard) for shard in self._shards)
            path, body = self._api.completion(prompt, self._new_tokens, stream=True)
            response = await connection.request("POST", path, body, _SECONDS)
        reply = read_reply(response)
        expected = self._expected.setdefault(name, reply.text)
        first_token = reply.token_times[0] - response.started
        return Waking(
            *(name, state, seconds, memory, first_token),
            *(reply.prompt_tokens, reply.cached_tokens, reply.text == expected),
        )


async def measure(url: str, arguments: argparse.Namespace) -> list[Waking]:
    """Raises ServerUnavailable, BadReply."""
    meter = Meter(url, await first_model(url, None), arguments.new_tokens)
    random = Random(arguments.seed)
    prompts = {"short": text(random, 8), "long": text(random, arguments.words)}
    states = ["awake", "asleep"] + ["cold"] * arguments.cold
    found = []
    for number_of_round in range(arguments.rounds):
        for state in states:
            for name, prompt in prompts.items():
                found.append(await meter.ask(name, prompt, state))
                tell(f"round {number_of_round + 1}, {name}, {state}: first token after {found[-1].first_token:.2f} s")
    return found


def _shards(url: str) -> Iterator[psutil.Process]:
    """Yields the shards of the server that listens on a port of this machine."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "tgi_server.shard.cli" in process.cmdline() and (launcher := process.parent()) is not None:
                family = (launcher, *launcher.children())
                ports = {each.laddr.port for relative in family for each in relative.net_connections("tcp")}
                if urlsplit(url).port in ports:
                    yield process


def _resident_bytes(process: psutil.Process) -> int:
    """Returns the memory of a process, without what it shares with others (proc_pid_smaps(5))."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _empty_cache() -> None:
    """Makes the system forget what files have. Raises ServerUnavailable without the right to."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        raise ServerUnavailable(f"--cold needs root: {error}") from error


def _table(found: list[Waking]) -> str:
    columns = (
        "prompt",
        "model",
        "sleep, s",
        "memory, MiB",
        "first token, s",
        "range",
        "tokens",
        "cached",
        "same answers",
    )
    rows = []
    for prompt, state in dict.fromkeys((each.prompt, each.state) for each in found):
        alike = [each for each in found if (each.prompt, each.state) == (prompt, state)]
        times = sorted(each.first_token for each in alike)
        sleeps = [each.sleep for each in alike if each.sleep is not None]
        rows.append(
            [
                *(prompt, state, number(median(sleeps)) if sleeps else ""),
                number(median(each.memory for each in alike) / _MIB),
                *(number(median(times)), f"{number(times[0])}-{number(times[-1])}"),
                *(str(alike[-1].prompt_tokens), str(alike[-1].cached_tokens)),
                "yes" if all(each.equal for each in alike) else "no",
            ]
        )
    return table(columns, rows)


async def _run(arguments: argparse.Namespace) -> list[Waking]:
    if arguments.url:
        return await measure(arguments.url, arguments)
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--enable-sleep-mode --prometheus-port 0 --prefix-cache-disk 16GiB:{folder} {arguments.server_flags}"
        command = ServerCommand("oatmill", f"{OURS.command} {flags}")
        async with running(command, arguments.start, _LOG, limit=_SECONDS) as server:
            return await measure(server.url, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--url", help="of a running server on this machine")
    server.add_argument("--start", type=Path, metavar="MODEL", help="a model folder or a GGUF file")
    parser.add_argument("--server-flags", default="", metavar="FLAGS", help="for the server that is started")
    parser.add_argument("--words", type=int, default=3000, help="of the long prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--cold", action="store_true", help="also with an empty cache of files; needs root")
    parser.add_argument("--new-tokens", type=int, default=8, help="of an answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other prompts (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    try:
        found = uvloop.run(_run(arguments))
    except (ServerDidNotStart, ServerUnavailable, BadReply) as error:
        sys.exit(f"error: {error}")
    print(_table(found), "\n")
    finish(found, arguments.output)


if __name__ == "__main__":
    main()
