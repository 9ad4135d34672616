r"""Measures agents: long system prompts with tools, then turns of a call, its result and a text, in a growing context.

    python -m benchmarks.agent --url http://127.0.0.1:8080 --agents 1 4 8
    python -m benchmarks.agent --start model.gguf --peer-command \
        "llama.cpp=python -m benchmarks.llama_cpp_server {gguf} {port} --parallel 8 --context 20480" \
        --peer-programs /opt/peers/llama/bin
    python -m benchmarks.agent --url http://127.0.0.1:8080 --agents 1 --turns 2 --tools 2 --system-words 100

Each agent has the same system prompt of about 4,000 tokens, twelve tools among them. In each turn the user says what
to do, the model calls a tool (`tool_choice: "required"`), gets its result and writes a text. Its messages are sent back
in the next request. After 20 turns the context has about 16,000 tokens. For each number of agents the system prompt is
a new one, and one request computes it before the agents start; the column `cold` has its time to the first token.

`cached` is the share of the repeated tokens (the agent's last prompt and answer) that came from the prefix cache, by
`usage.prompt_tokens_details.cached_tokens`. For a server that does not report that, it is estimated from the times to
the first token, relative to the cold prompt (marked with ~). Prints a table; the last line is JSON.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from benchmarks.api import ChatMessage
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.reply import BadReply, Reply, read_reply
from benchmarks.report import finish, number, percentile, table, tell
from benchmarks.serve import first_model
from benchmarks.servers import (
    ServerCommand,
    ServerDidNotStart,
    add_peer_arguments,
    add_server_arguments,
    chosen_peers,
    running,
    started_here,
)
from benchmarks.words import text
from benchmarks.workloads import positive

_LOGS = Path("runs/logs")
# Servers report exact numbers of cached tokens where not everybody shares the cache.
_SALT = "agents"
_COLUMNS = (
    *("server", "agents", "prompt tokens", "cold, s", "first token p50, s", "p99, s", "max, s", "cached, %"),
    *("total, s", "calls that are JSON", "failed"),
)
_VERBS = ("read", "search", "list", "write", "rename", "compare", "summarise", "count", "check", "move", "copy", "open")


@dataclass(frozen=True, slots=True)
class Plan:
    """An agent's load. Words of the system prompt, of a user's message and of a tool's result; tokens of an answer.

    tools: how many of the twelve they have.
    """

    turns: int
    tools: int
    system_words: int
    user_words: int
    result_words: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request of an agent. repeats: tokens of its last prompt and answer; None for its first. Times in seconds."""

    first_token: float
    prompt_tokens: int
    cached_tokens: int | None
    repeats: int | None


@dataclass(slots=True)
class MeasuredAgents:
    """The results of a number of agents at once. cold: seconds to the first token of the system prompt alone.

    called: answers that had to be calls, and were calls with arguments in JSON; asked: their number.
    """

    server: str
    agents: int
    cold: float = 0.0
    cold_tokens: int = 0
    seconds: float = 0.0
    requests: list[Request] = field(default_factory=list)
    asked: int = 0
    called: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def reported(self) -> bool:
        """Returns True if the server reports cached tokens."""
        return any(each.cached_tokens is not None for each in self.requests)

    def cached_share(self) -> float | None:
        """Returns the share of the tokens which repeat that was cached; None without such requests."""
        again = [each for each in self.requests if each.repeats]
        if not again:
            return None
        return sum(min(self._cached(each), each.repeats or 0) for each in again) / sum(
            each.repeats or 0 for each in again
        )

    def _cached(self, request: Request) -> float:
        if self.reported:
            return request.cached_tokens or 0
        rate = self.cold_tokens / self.cold
        return max(0.0, request.prompt_tokens - rate * request.first_token)

    def row(self) -> list[str]:
        first = [each.first_token for each in self.requests]
        share = self.cached_share()
        cached = "-" if share is None else f"{'' if self.reported else '~'}{100 * share:.1f}"
        longest = str(max((each.prompt_tokens for each in self.requests), default=0))
        times = (percentile(first, 50), percentile(first, 99), max(first, default=None))
        called = f"{self.called} of {self.asked}"
        failed = str(len(self.failures))
        cells = [self.server, str(self.agents), longest, number(self.cold), *map(number, times), cached]
        return [*cells, number(self.seconds), called, failed]


def tools(count: int) -> list[dict[str, Any]]:
    """Returns tools of about a hundred tokens each."""
    properties = {
        "path": {"type": "string", "description": "the file or the folder, from the root of the project"},
        "query": {"type": "string", "description": "words or a regular expression"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "description": "the greatest number of results"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}
    return [
        {
            "type": "function",
            "function": {
                "name": f"{verb}_files",
                "description": f"Use this tool to {verb} files of the project, one path at a time. It returns text.",
                "parameters": parameters,
            },
        }
        for verb in _VERBS[:count]
    ]


class Agent:
    """One agent: its conversation, and the requests of it."""

    def __init__(self, url: str, model: str, plan: Plan, system: str, seed: str, into: MeasuredAgents) -> None:
        self._url = url
        self._model = model
        self._plan = plan
        self._random = Random(seed)
        self._into = into
        self._messages: list[ChatMessage] = [{"role": "system", "content": system}]
        self._repeats: int | None = None

    async def run(self, limit: float) -> None:
        """Does all turns. limit: seconds for one request. A request that fails ends them, and is noted."""
        with closing(Connection(self._url)) as connection:
            try:
                for turn in range(self._plan.turns):
                    await self._turn(connection, turn, limit)
            except (ServerUnavailable, BadReply) as error:
                self._into.failures.append(str(error))

    async def _turn(self, connection: Connection, turn: int, limit: float) -> None:
        plan, random = self._plan, self._random
        self._messages.append({"role": "user", "content": f"Step {turn}. {text(random, plan.user_words)}"})
        reply = await self._ask(connection, "required", limit)
        self._messages += self._called(reply, turn)
        self._messages.append(
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": text(random, plan.result_words)}
        )
        reply = await self._ask(connection, "auto", limit)
        self._messages.append({"role": "assistant", "content": reply.text or "Done."})

    def _called(self, reply: Reply, turn: int) -> Iterator[ChatMessage]:
        """Yields the message with the first call of an answer; with a call of ours if it has none in JSON."""
        self._into.asked += 1
        try:
            call = reply.calls[0]
            json.loads(call["arguments"])
            self._into.called += 1
        except (LookupError, ValueError):
            call = {"name": "read_files", "arguments": json.dumps({"path": f"source/{turn}.py"})}
        yield {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": call}],
        }

    async def _ask(self, connection: Connection, tool_choice: str, limit: float) -> Reply:
        body = request_body(self._model, self._messages, self._plan, self._plan.new_tokens, tool_choice)
        response = await connection.request("POST", "/v1/chat/completions", body, limit)
        reply = read_reply(response)
        prompt = reply.prompt_tokens or 0
        first = reply.token_times[0] - response.started
        self._into.requests.append(Request(first, prompt, reply.cached_tokens, self._repeats))
        self._repeats = prompt + reply.new_tokens
        return reply


def request_body(model: str, messages: Sequence[ChatMessage], plan: Plan, new_tokens: int, tool_choice: str) -> bytes:
    body = {"model": model, "messages": messages, "max_tokens": new_tokens, "temperature": 0, "cache_salt": _SALT}
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body | streaming | {"tools": tools(plan.tools), "tool_choice": tool_choice}).encode()


async def measure(name: str, url: str, model: str, agents: int, plan: Plan, seed: str, limit: float) -> MeasuredAgents:
    """Runs so many agents at once. Raises ServerUnavailable, BadReply if the system prompt cannot be computed."""
    result = MeasuredAgents(name, agents)
    system = f"You are one of {agents} agents of team {seed}. {text(Random(seed), plan.system_words)}"
    messages: list[ChatMessage] = [{"role": "system", "content": system}, {"role": "user", "content": "Are you there?"}]
    with closing(Connection(url)) as connection:
        response = await connection.request(
            "POST", "/v1/chat/completions", request_body(model, messages, plan, 1, "auto"), limit
        )
    reply = read_reply(response)
    result.cold, result.cold_tokens = reply.token_times[0] - response.started, reply.prompt_tokens or 0
    started = time.perf_counter()
    made = (Agent(url, model, plan, system, f"{seed}/{place}", result) for place in range(agents))
    await asyncio.gather(*(each.run(limit) for each in made))
    result.seconds = time.perf_counter() - started
    return result


async def _measure_all(arguments: argparse.Namespace, name: str, url: str) -> list[MeasuredAgents]:
    plan = Plan(
        arguments.turns,
        arguments.tools,
        arguments.system_words,
        arguments.user_words,
        arguments.result_words,
        arguments.new_tokens,
    )
    model = arguments.model or await first_model(url, None)
    results = []
    for agents in arguments.agents:
        tell(f"{name}: {agents} agents, {plan.turns} turns")
        seed = f"{arguments.seed}-{agents}"
        results.append(await measure(name, url, model, agents, plan, seed, arguments.timeout))
        for failure in results[-1].failures:
            tell(f"  failed: {failure}")
    return results


async def _run(arguments: argparse.Namespace, servers: Sequence[ServerCommand]) -> list[MeasuredAgents]:
    if arguments.url is not None:
        return await _measure_all(arguments, "server", arguments.url)
    results = []
    for command in servers:
        log = _LOGS / f"agent-{command.name}.log"
        tell(f"{command.name}: starting, log in {log}")
        async with running(command, arguments.start, log, arguments.start_limit) as server:
            results += await _measure_all(arguments, command.name, server.url)
    return results


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_arguments(parser)
    parser.add_argument("--agents", type=positive, nargs="+", default=[1, 4, 8], help="agents at once (default: 1 4 8)")
    parser.add_argument("--turns", type=positive, default=20, help="turns of an agent (default: %(default)s)")
    parser.add_argument(
        "--tools", type=int, choices=range(1, 13), default=12, metavar="N", help="1 to 12 (default: 12)"
    )
    parser.add_argument(
        "--system-words", type=positive, default=2400, help="of the system prompt (default: %(default)s)"
    )
    parser.add_argument("--user-words", type=positive, default=40, help="of a user's message (default: %(default)s)")
    parser.add_argument("--result-words", type=positive, default=400, help="of a tool's result (default: %(default)s)")
    parser.add_argument("--new-tokens", type=positive, default=64, help="maximum of an answer (default: %(default)s)")
    parser.add_argument("--seed", default="0", help="another seed, other texts (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one request (default: %(default)s)")
    add_peer_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    try:
        peers = chosen_peers(arguments)
        if arguments.url is not None and peers:
            sys.exit("error: --url measures one server; peers need --start")
        ours = started_here(arguments)
        results = uvloop.run(_run(arguments, [ours, *peers]))
    except (ServerDidNotStart, ServerUnavailable, BadReply, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    print(table(_COLUMNS, [each.row() for each in results]))
    finish([asdict(each) for each in results], arguments.output)
    if any(each.failures for each in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
