"""Plain requests in the company of others, which have grammars or are plain as well."""

import asyncio
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.connection import Connection, Response
from benchmarks.reply import read_reply
from benchmarks.report import percentile
from benchmarks.schemas import large_schema
from benchmarks.words import text

_WORDS = 64
_QUIET_SECONDS = 1.0
_POLL_SECONDS = 0.005
_COMPANION_TOKENS = 12
"""So many tokens of a companion for each of a plain request: what is forced goes fast."""


@dataclass(frozen=True, slots=True)
class Company:
    """grammars: whether the companions have one each.

    there_before: whether all of them run when the others arrive. They start together, with grammars that are compiled:
    so they have come as far as plain ones have, apart from forced tokens.
    """

    grammars: bool
    there_before: bool


@dataclass(frozen=True, slots=True)
class Together:
    """What became of the plain requests beside their companions.

    tokens_per_s: of all plain requests, from sending the first to the last one's end; companions_per_s: of the
    companions meanwhile. gaps: between two tokens of a plain request, in seconds. running: the share of the
    companions that had their first token and were not at their end, on average over the plain requests' tokens.
    """

    tokens_per_s: float
    companions_per_s: float
    gap_p50: float
    gap_p99: float
    running: float


async def keep_company(url: str, company: Company, requests: int, new_tokens: int, seed: str) -> Together:
    """Runs `requests` plain requests of `new_tokens` tokens beside as many companions, which go on until the end.

    Raises ServerUnavailable, BadReply.
    """
    random = Random(seed)
    with _connections(url, requests) as plain, _connections(url, requests) as others:
        grammars = [_grammar(random) if company.grammars else None for _ in others]
        bodies = [_body(random, new_tokens * _COMPANION_TOKENS, grammar) for grammar in grammars]
        if company.there_before:
            await _compile(plain, grammars, random)
        running = [asyncio.create_task(_generate(*each)) for each in zip(others, bodies, strict=True)]
        try:
            if company.there_before:
                await _until_all_speak(others, running)
            asked = (_generate(each, _body(random, new_tokens)) for each in plain)
            responses = await asyncio.gather(*asked)
            for task in running:
                if task.done():
                    read_reply(task.result())
            pieces = [list(each.received) for each in others]
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    await asyncio.sleep(_QUIET_SECONDS)  # the server notices that the companions have left
    ends = [None if not task.done() or task.cancelled() else task.result().ended for task in running]
    return _together(responses, pieces, ends)


def _together(
    responses: Sequence[Any], pieces: Sequence[Sequence[tuple[float, bytes]]], ends: Sequence[Any]
) -> Together:
    started = min(each.started for each in responses)
    ended = max(each.ended for each in responses)
    replies = [read_reply(each) for each in responses]
    times = sorted(moment for reply in replies for moment in reply.token_times)
    gaps = [b - a for reply in replies for a, b in zip(reply.token_times, reply.token_times[1:], strict=False)]
    spans = [(each[0][0], end or ended) for each, end in zip(pieces, ends, strict=True) if each]
    running = statistics.mean(sum(first <= moment <= last for first, last in spans) for moment in times)
    counted = sum(data.count(b"data:") for each in pieces for moment, data in each if started <= moment <= ended)
    return Together(
        tokens_per_s=len(times) / (ended - started),
        companions_per_s=counted / (ended - started),
        gap_p50=percentile(gaps, 50) or 0.0,
        gap_p99=percentile(gaps, 99) or 0.0,
        running=running / len(pieces),
    )


@contextmanager
def _connections(url: str, count: int) -> Iterator[list[Connection]]:
    connections = [Connection(url) for _ in range(count)]
    try:
        yield connections
    finally:
        for each in connections:
            each.close()


async def _generate(connection: Connection, body: bytes) -> Response:
    return await connection.request("POST", "/generate_stream", body)


async def _until_all_speak(connections: Sequence[Connection], running: Sequence[asyncio.Task[Response]]) -> None:
    while not all(each.received for each in connections):
        for task in running:
            if task.done():
                read_reply(task.result())
        await asyncio.sleep(_POLL_SECONDS)


def _grammar(random: Random) -> dict[str, Any]:
    return {"type": "json", "value": large_schema(random)}


async def _compile(
    connections: Sequence[Connection], grammars: Sequence[dict[str, Any] | None], random: Random
) -> None:
    """Asks for a token with each grammar: so companions with grammars start at one time, as those without do."""
    asked = (_generate(each, _body(random, 1, grammar)) for each, grammar in zip(connections, grammars, strict=True))
    for response in await asyncio.gather(*asked):
        read_reply(response)


def _body(random: Random, new_tokens: int, grammar: dict[str, Any] | None = None) -> bytes:
    parameters = {"max_new_tokens": new_tokens, "ignore_eos": True, "grammar": grammar}
    return json.dumps({"inputs": text(random, _WORDS), "parameters": parameters}).encode()
