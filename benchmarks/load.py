"""A closed loop of users against one server."""

import asyncio
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

from benchmarks.api import ChatMessage, OpenAi
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.reply import BadReply, Reply, read_reply
from benchmarks.words import text
from benchmarks.workloads import Workload

_WARM_UP_SEED = -1
# Seconds for one reply beside other work, which may be a long one.
_STREAM_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Target:
    """The server that the users ask, and the form of their requests. timeout: seconds for one request."""

    url: str
    api: OpenAi
    api_key: str | None = None
    timeout: float = 300.0


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """One request. Times in seconds; first_token: None unless streamed; gaps: between a stream's tokens."""

    latency: float
    first_token: float | None
    gaps: list[float]
    new_tokens: int
    prompt_tokens: int | None


@dataclass(slots=True)
class WorkloadResult:
    """The results of a workload. seconds: from the first request to the last reply. cpu_seconds: of this process."""

    workload: Workload
    records: list[MeasuredRequest] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


async def run_workload(server: Target, workload: Workload, seed: int = 0, *, warm_up: bool = True) -> WorkloadResult:
    """Lets all users of the workload send all their requests. A failed request is noted, and its chat given up.

    warm_up: lets every user send one unmeasured request first.
    """
    connections = [Connection(server.url, server.api_key) for _ in range(workload.users)]
    try:
        if warm_up:
            await _run(server, replace(workload, repeat=1, turns=min(2, workload.turns)), _WARM_UP_SEED, connections)
        return await _run(server, workload, seed, connections)
    finally:
        for connection in connections:
            connection.close()


async def stream_texts(
    url: str, api: OpenAi, user: int, words: int, new_tokens: int, ended: asyncio.Event
) -> list[list[float]]:
    """Streams replies to texts of so many words, one after the other, until `ended`. Returns when the tokens of each
    came.

    Raises ServerUnavailable, BadReply.
    """
    random, times = Random(f"stream {user}"), list[list[float]]()
    connection = Connection(url)
    while not ended.is_set():
        path, body = api.completion(text(random, words), new_tokens, stream=True)
        times.append(read_reply(await connection.request("POST", path, body, _STREAM_SECONDS)).token_times)
    connection.close()
    return times


async def _run(server: Target, workload: Workload, seed: int, connections: list[Connection]) -> WorkloadResult:
    outcome = WorkloadResult(workload)
    progress = asyncio.create_task(_show_progress(outcome))
    started, cpu_started = time.perf_counter(), time.process_time()
    users = (_User(server, connection, outcome) for connection in connections)
    try:
        await asyncio.gather(*(user.live(seed, number) for number, user in enumerate(users)))
    finally:
        progress.cancel()
    outcome.seconds = time.perf_counter() - started
    outcome.cpu_seconds = time.process_time() - cpu_started
    return outcome


class _User:
    def __init__(self, server: Target, connection: Connection, outcome: WorkloadResult) -> None:
        self._server = server
        self._connection = connection
        self._outcome = outcome

    async def live(self, seed: int, number: int) -> None:
        workload, api = self._outcome.workload, self._server.api
        if adapter := workload.adapter(number):
            api = api.named(adapter)
        if workload.sampled:
            api = api.sampled(workload.top_k)
        for turns in workload.prompts(seed, number):
            try:
                await self._converse(turns, api)
            except (ServerUnavailable, BadReply) as error:
                self._outcome.failures.append(str(error))

    async def _converse(self, turns: list[str], api: OpenAi) -> None:
        workload = self._outcome.workload
        history: list[ChatMessage] = []
        for turn in turns:
            history.append({"role": "user", "content": turn})
            if workload.turns == 1:
                path, body = api.completion(turn, workload.new_tokens, workload.stream)
            else:
                path, body = api.chat(history, workload.new_tokens, workload.stream)
            reply = await self._ask(path, body)
            history.append({"role": "assistant", "content": reply.text})

    async def _ask(self, path: str, body: bytes) -> Reply:
        response = await self._connection.request("POST", path, body, self._server.timeout)
        reply = read_reply(response)
        times = reply.token_times
        self._outcome.records.append(
            MeasuredRequest(
                latency=response.ended - response.started,
                first_token=times[0] - response.started if times else None,
                gaps=[later - earlier for earlier, later in pairwise(times)],
                new_tokens=reply.new_tokens,
                prompt_tokens=reply.prompt_tokens,
            )
        )
        return reply


async def _show_progress(outcome: WorkloadResult) -> None:
    while True:
        await asyncio.sleep(5)
        failed = f", {len(outcome.failures)} failed" if outcome.failures else ""
        done = f"{len(outcome.records)} of {outcome.workload.requests} replies{failed}"
        print(f"  {outcome.workload.name}: {done}", file=sys.stderr, flush=True)
