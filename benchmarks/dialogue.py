"""Measures warm prompts and early answers: a recorded dialogue of a voice assistant, beside streams of other users.

    python -m benchmarks.dialogue                        Oatmill with the demo model
    python -m benchmarks.dialogue --start FOLDER         Oatmill with another model
    python -m benchmarks.dialogue --url URL              a running server

Each session sends the turns of `dialogue.json`, whose system message says what the assistant knows at that turn. The
words of a turn come at `--speed` times speaking pace, with a pause within the turn. After `--silence` seconds without a
word the turn is over and the request is sent; times are counted from there. Sessions of three kinds follow each other:
without `/v1/warm`; with `/v1/warm` for the words so far, while the others are spoken; and with an early answer, too,
whose first tokens are generated after `--notice` seconds of silence, and dropped if another word comes. The first
sentence counts as there within a step if it takes no longer than the fastest first token of all plus one step.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import uvloop

from benchmarks.api import ChatMessage, OpenAi
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.load import stream_texts
from benchmarks.reply import BadReply, Reply, read_reply
from benchmarks.report import finish, number, percentile, table, tell
from benchmarks.servers import OURS, ServerDidNotStart, running
from benchmarks.speech import RECORDED, Pace, SpokenTurn, conversations
from tgi_server import demo_model

_SENTENCE_ENDS = frozenset(".!?")
_START_SECONDS = 600.0
_LOG = Path("runs/logs/dialogue.log")
_TTL_SECONDS = 60
# Of the streams of other users.
_WORDS, _NEW_TOKENS = 64, 96
_COLUMNS = (
    *("prompts", "turns", "tokens", "computed after the turn", "first token p50, ms", "p90, ms"),
    *("first sentence p50, ms", "p90, ms", "within a step"),
    *("other streams, tokens/s", "gap p50, ms", "p99, ms"),
)
# Exact numbers of cached tokens are reported only where not everybody shares the cache.
_SALT = "dialogue"


class Preparation(Enum):
    """The kinds of computation that a session does before a turn is over."""

    NOTHING = "as they come"
    PROMPT = "warm"
    ANSWER = "warm, with early answers"


@dataclass(slots=True)
class Measured:
    """Results of all sessions of a kind. Times in seconds. spans: of sessions, on one clock.

    prompts: tokens of each prompt, and those of them that were not cached when the turn was over. sentences: when the
    first sentence of each answer was there. steps: times between tokens of answers.
    """

    kind: Preparation
    prompts: list[tuple[int, int]] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    sentences: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    stream_tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    def add_reply(self, reply: Reply, said: float) -> None:
        """Notes an answer. said: when the turn was over."""
        self.first_tokens.append(reply.token_times[0] - said)
        self.sentences.append(reply.token_times[first_sentence(reply.texts) - 1] - said)
        self.steps += [later - earlier for earlier, later in pairwise(reply.token_times)]
        tokens = reply.prompt_tokens or 0
        self.prompts.append((tokens, tokens - (reply.cached_tokens or 0)))

    def add_stream(self, token_times: Sequence[float]) -> None:
        """Notes the tokens of another user's stream that came during the sessions."""
        for begun, ended in self.spans:
            within = [each for each in token_times if begun <= each <= ended]
            self.stream_tokens += len(within)
            self.gaps += [later - earlier for earlier, later in pairwise(within)]

    @property
    def stream_tokens_per_s(self) -> float:
        return self.stream_tokens / sum(ended - begun for begun, ended in self.spans)

    def row(self, soonest: float) -> list[str]:
        """Returns the cells of a table. soonest: seconds in which a request is answered if one step is to compute."""
        times = [percentile(each, share) for each in (self.first_tokens, self.sentences) for share in (50, 90)]
        times += [percentile(self.gaps, 50), percentile(self.gaps, 99)]
        first, worst, sentence, late, gap, gaps = (number(None if each is None else 1000 * each) for each in times)
        tokens, computed = (number(fmean(each)) for each in zip(*self.prompts, strict=True))
        ready = f"{sum(each <= soonest for each in self.sentences) / len(self.sentences):.0%}"
        turns = str(len(self.first_tokens))
        prepared = [self.kind.value, turns, tokens, computed, first, worst, sentence, late, ready]
        return [*prepared, number(self.stream_tokens_per_s), gap, gaps]


def first_sentence(texts: Sequence[str]) -> int:
    """Returns the number of tokens of the first sentence; of all, if none ends."""
    return next((place for place, text in enumerate(texts, 1) if set(text) & _SENTENCE_ENDS), len(texts))


async def run_session(
    url: str, api: OpenAi, recorded: dict[str, Any], session: int, pace: Pace, into: Measured
) -> None:
    """Plays the dialogue once. Raises ServerUnavailable, BadReply."""
    connection = Connection(url)
    begun = time.perf_counter()
    for turn in conversations(recorded, session):
        early = await _speak(url, api, turn, session, pace, into.kind)
        said = time.perf_counter()
        body = _body(api, turn.said(len(turn.words)), pace)
        into.add_reply(
            read_reply(await connection.request("POST", "/v1/chat/completions", json.dumps(body).encode())), said
        )
        if early is not None:
            await early
        await _sleep_until(said + pace.pause)
    into.spans.append((begun, time.perf_counter()))
    connection.close()


def _body(api: OpenAi, messages: list[ChatMessage], pace: Pace) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(api.chat(messages, pace.new_tokens, stream=True)[1])
    return body | {"cache_salt": _SALT}


async def _speak(
    url: str, api: OpenAi, turn: SpokenTurn, session: int, pace: Pace, kind: Preparation
) -> "asyncio.Task[None] | None":
    """Returns once the turn is over: the request for an early answer, which may still run. A warm prompt that is not
    ready by then is given up, and so is an early answer when another word comes.
    """
    begun = time.perf_counter()
    warming: asyncio.Task[None] | None = None
    early: asyncio.Task[None] | None = None

    def prepare(spoken: int, answer_tokens: int = 0) -> "asyncio.Task[None]":
        body = _body(api, turn.said(spoken), pace)
        body |= {"ttl_seconds": _TTL_SECONDS, "prompt_cache_key": f"kitchen {session}", "answer_tokens": answer_tokens}
        return asyncio.create_task(_warm(url, body))

    for spoken, (due, following) in enumerate(pairwise(pace.moments(turn)), 1):
        await _sleep_until(begun + due)
        await _give_up(early)
        early = None
        idle = warming is None or warming.done()
        last = spoken == len(turn.words)
        if kind is not Preparation.NOTHING and idle and not last and spoken % pace.warm_every == 1 % pace.warm_every:
            if warming is not None:
                warming.result()
            warming = prepare(spoken)
        if kind is Preparation.ANSWER and following - due > pace.notice:
            await _sleep_until(begun + due + pace.notice)
            await _give_up(warming)
            warming, early = None, prepare(spoken, pace.new_tokens)
        if last:
            await _sleep_until(begun + following)
    await _give_up(warming)
    return early


async def _give_up(request: "asyncio.Task[None] | None") -> None:
    if request is not None:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def _sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.perf_counter()))


async def _warm(url: str, body: dict[str, Any]) -> None:
    connection = Connection(url)
    try:
        response = await connection.request("POST", "/v1/warm", json.dumps(body).encode())
        if response.status != 200:
            raise BadReply(f"/v1/warm: status {response.status}: {response.body[:200]!r}")
    finally:
        connection.close()


async def measure(url: str, model: str, recorded: dict[str, Any], arguments: argparse.Namespace) -> list[Measured]:
    """Plays sessions of all kinds in turns, beside streams. Raises ServerUnavailable, BadReply."""
    api, ended, sessions = OpenAi(model), asyncio.Event(), count(1)
    pace = Pace.of(arguments)
    streams = [
        asyncio.create_task(stream_texts(url, api, user, _WORDS, _NEW_TOKENS, ended))
        for user in range(arguments.streams)
    ]
    results = [Measured(kind) for kind in Preparation]
    try:
        for round_ in range(-1, arguments.sessions):
            # The first round is not counted. The order changes, so that what grows over time is in all.
            counted = results if round_ >= 0 else [Measured(kind) for kind in Preparation]
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
    server.add_argument("--url", help="of a running server")
    parser.add_argument("--sessions", type=int, default=6, help="of each kind (default: %(default)s)")
    parser.add_argument(
        "--speed", type=float, default=4.0, help="of speech, as a multiple of usual speed (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-every", type=int, default=3, metavar="WORDS", help="words between two calls of /v1/warm (default: 3)"
    )
    parser.add_argument(
        "--notice", type=float, default=0.2, help="seconds of silence until an early answer (default: %(default)s)"
    )
    parser.add_argument(
        "--silence", type=float, default=0.8, help="seconds of silence that end a turn (default: %(default)s)"
    )
    parser.add_argument("--pause", type=float, default=1.5, help="seconds from a turn's end to the next (default: 1.5)")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=2, help="of other users (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    try:
        results = uvloop.run(_run(arguments))
    except (ServerDidNotStart, ServerUnavailable, BadReply) as error:
        sys.exit(f"error: {error}")
    cold = results[0]
    step = percentile(cold.steps, 50) or 0.0
    fastest = min(each for measured in results for each in measured.first_tokens)
    print(table(_COLUMNS, [each.row(fastest + step) for each in results]))
    print(f"a step takes {1000 * step:.1f} ms; the fastest first token took {1000 * fastest:.1f} ms")
    for each in results[1:]:
        first, before = (percentile(some.first_tokens, 50) or 0.0 for some in (each, cold))
        lost = 1 - each.stream_tokens_per_s / cold.stream_tokens_per_s if cold.stream_tokens else 0.0
        print(
            f"{each.kind.value}: first token {1 - first / before:.0%} sooner, {lost:.1%} fewer tokens in other streams"
        )
    finish([asdict(each) | {"kind": each.kind.value, "gaps": [], "steps": []} for each in results], arguments.output)


if __name__ == "__main__":
    main()
