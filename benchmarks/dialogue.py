"""Measures warm prompts: a recorded dialogue of a voice assistant, word by word, beside streams of other users.

    python -m benchmarks.dialogue                        Oatmill with the demo model
    python -m benchmarks.dialogue --start FOLDER         Oatmill with another model
    python -m benchmarks.dialogue --url URL              a server that runs

Each session sends the turns of `dialogue.json`, whose system message says what the assistant knows at that turn. The
words of a turn come at speaking pace, some times faster. Sessions without and with `/v1/warm` follow each other; those
with it send the words so far while the others are spoken. The time to the first token is that from the last word.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import uvloop

from benchmarks.api import ChatMessage, OpenAi
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.load import stream_texts
from benchmarks.reply import BadReply, read_reply
from benchmarks.report import finish, number, percentile, table, tell
from benchmarks.servers import OURS, ServerDidNotStart, running
from tgi_server import demo_model

RECORDED = Path(__file__).with_suffix(".json")
# English at the pace of a conversation.
WORDS_PER_SECOND = 2.5
_START_SECONDS = 600.0
_LOG = Path("runs/logs/dialogue.log")
_TTL_SECONDS = 60
# Of the streams of other users.
_WORDS, _NEW_TOKENS = 64, 96
_COLUMNS = (
    *("prompts", "turns", "tokens", "computed after the last word", "first token p50, ms", "p90, ms"),
    *("other streams, tokens/s", "gap p50, ms", "p99, ms"),
)
# Exact numbers of cached tokens are reported only where not everybody shares the cache.
_SALT = "dialogue"


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of speech, in words a second, and after how many of them a prompt is warmed, if it is.

    pause: seconds from the last word of a turn to the first of the next, unless the answer takes longer.
    """

    words_per_second: float
    warm_every: int
    pause: float
    new_tokens: int


@dataclass(slots=True)
class Measured:
    """Results of all sessions without, or with, warm prompts. Times in seconds. spans: of sessions, on one clock.

    prompts: tokens of each prompt, and those of them that were not cached when its last word came.
    """

    warm: bool
    prompts: list[tuple[int, int]] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    stream_tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    def add_stream(self, token_times: Sequence[float]) -> None:
        """Notes the tokens of another user's stream that came during the sessions."""
        for begun, ended in self.spans:
            within = [each for each in token_times if begun <= each <= ended]
            self.stream_tokens += len(within)
            self.gaps += [later - earlier for earlier, later in pairwise(within)]

    @property
    def stream_tokens_per_s(self) -> float:
        return self.stream_tokens / sum(ended - begun for begun, ended in self.spans)

    def row(self) -> list[str]:
        """Returns the cells of a table."""
        times = [
            *(percentile(self.first_tokens, 50), percentile(self.first_tokens, 90)),
            *(percentile(self.gaps, 50), percentile(self.gaps, 99)),
        ]
        first, worst, gap, gaps = (number(None if each is None else 1000 * each) for each in times)
        tokens, computed = (number(fmean(each)) for each in zip(*self.prompts, strict=True))
        kind = "warm" if self.warm else "as they come"
        turns = str(len(self.first_tokens))
        return [kind, turns, tokens, computed, first, worst, number(self.stream_tokens_per_s), gap, gaps]


def conversations(recorded: dict[str, Any], session: int) -> Iterator[tuple[list[ChatMessage], list[str]]]:
    """Yields the messages before each turn of a session, and the words of the turn.

    Other sessions have only the rules in common with it.
    """
    history: list[ChatMessage] = []
    for turn in recorded["turns"]:
        known = f"{recorded['rules']}\nThis is kitchen {session}. {recorded['task']} {turn['state']}"
        yield [{"role": "system", "content": known}, *history], turn["user"].split()
        history.append({"role": "user", "content": turn["user"]})
        history.append({"role": "assistant", "content": turn["assistant"]})


async def run_session(
    url: str, api: OpenAi, recorded: dict[str, Any], session: int, pace: Pace, into: Measured
) -> None:
    """Plays the dialogue once. Raises ServerUnavailable, BadReply."""
    connection = Connection(url)
    begun = time.perf_counter()
    for messages, words in conversations(recorded, session):
        await _speak(url, api, messages, words, session, pace, warm=into.warm)
        said = time.perf_counter()
        path, body = api.chat([*messages, {"role": "user", "content": " ".join(words)}], pace.new_tokens, stream=True)
        salted = json.dumps(json.loads(body) | {"cache_salt": _SALT}).encode()
        reply = read_reply(await connection.request("POST", path, salted))
        into.first_tokens.append(reply.token_times[0] - said)
        tokens = reply.prompt_tokens or 0
        into.prompts.append((tokens, tokens - (reply.cached_tokens or 0)))
        await asyncio.sleep(max(0.0, said + pace.pause - time.perf_counter()))
    into.spans.append((begun, time.perf_counter()))
    connection.close()


async def _speak(
    url: str, api: OpenAi, messages: list[ChatMessage], words: list[str], session: int, pace: Pace, *, warm: bool
) -> None:
    """Returns once the last word has come. A warm prompt that is not ready by then is given up."""
    begun, warming = time.perf_counter(), None
    for spoken in range(1, len(words) + 1):
        await asyncio.sleep(max(0.0, begun + spoken / pace.words_per_second - time.perf_counter()))
        idle = warming is None or warming.done()
        if warm and idle and spoken < len(words) and spoken % pace.warm_every == 1 % pace.warm_every:
            if warming is not None:
                warming.result()
            partial: ChatMessage = {"role": "user", "content": " ".join(words[:spoken])}
            warming = asyncio.create_task(_warm(url, api, [*messages, partial], session))
    if warming is not None:
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)


async def _warm(url: str, api: OpenAi, messages: list[ChatMessage], session: int) -> None:
    connection = Connection(url)
    try:
        body = json.loads(api.chat(messages, 1, stream=False)[1])
        body |= {"ttl_seconds": _TTL_SECONDS, "prompt_cache_key": f"kitchen {session}", "cache_salt": _SALT}
        response = await connection.request("POST", "/v1/warm", json.dumps(body).encode())
        if response.status != 200:
            raise BadReply(f"/v1/warm: status {response.status}: {response.body[:200]!r}")
    finally:
        connection.close()


async def measure(url: str, model: str, recorded: dict[str, Any], arguments: argparse.Namespace) -> list[Measured]:
    """Plays sessions without and with warm prompts in turns, beside streams. Raises ServerUnavailable, BadReply."""
    api, ended, sessions = OpenAi(model), asyncio.Event(), count(1)
    pace = Pace(WORDS_PER_SECOND * arguments.speed, arguments.warm_every, arguments.pause, arguments.tokens)
    streams = [
        asyncio.create_task(stream_texts(url, api, user, _WORDS, _NEW_TOKENS, ended))
        for user in range(arguments.streams)
    ]
    results = [Measured(warm=False), Measured(warm=True)]
    try:
        for round_ in range(-1, arguments.sessions):
            # The first round is not counted. The order changes, so that what grows over time is in both.
            counted = results if round_ >= 0 else [Measured(warm=False), Measured(warm=True)]
            for each in counted if round_ % 2 else reversed(counted):
                await run_session(url, api, recorded, next(sessions), pace, each)
            tell(f"round {round_ + 1} of {arguments.sessions}")
    finally:
        ended.set()
        token_times = await asyncio.gather(*streams)
    for each in results:
        for replies in token_times:
            each.add_stream([time for times in replies for time in times])
    return results


@asynccontextmanager
async def _server(arguments: argparse.Namespace) -> AsyncIterator[tuple[str, str]]:
    """Yields the URL and the model's name."""
    if arguments.url is not None:
        yield arguments.url, "tgi"
        return
    async with running(OURS, arguments.start, _LOG, _START_SECONDS) as server:
        yield server.url, "tgi"


async def _run(arguments: argparse.Namespace) -> list[Measured]:
    recorded = json.loads(RECORDED.read_text())
    async with _server(arguments) as (url, model):
        return await measure(url, model, recorded, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--start", type=Path, default=demo_model.PATH, metavar="MODEL", help="a model folder")
    server.add_argument("--url", help="of a server that runs")
    parser.add_argument("--sessions", type=int, default=6, help="of each kind (default: %(default)s)")
    parser.add_argument("--speed", type=float, default=4.0, help="of speech, in usual speeds (default: %(default)s)")
    parser.add_argument("--warm-every", type=int, default=3, metavar="WORDS", help="words of a turn (default: 3)")
    parser.add_argument(
        "--pause", type=float, default=1.5, help="seconds from a turn's last word to the next turn (default: 1.5)"
    )
    parser.add_argument("--tokens", type=int, default=24, help="of an answer (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=2, help="of other users (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    try:
        results = uvloop.run(_run(arguments))
    except (ServerDidNotStart, ServerUnavailable, BadReply) as error:
        sys.exit(f"error: {error}")
    print(table(_COLUMNS, [each.row() for each in results]))
    cold, warm = results
    first = [percentile(each.first_tokens, 50) or 0.0 for each in results]
    lost = f", {1 - warm.stream_tokens_per_s / cold.stream_tokens_per_s:.1%} fewer tokens in other streams"
    print(f"with warm prompts: first token {1 - first[1] / first[0]:.0%} sooner{lost if cold.stream_tokens else ''}")
    finish([asdict(each) | {"gaps": []} for each in results], arguments.output)


if __name__ == "__main__":
    main()
