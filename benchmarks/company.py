"""Plain requests in the company of others, which have grammars or are plain as well."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from random import Random

from benchmarks.connection import Connection, TimedResponse
from benchmarks.reply import read_reply
from benchmarks.report import percentile
from benchmarks.schemas import JsonSchema, large_schema
from benchmarks.words import text

_WORDS = 64
_QUIET_SECONDS = 1.0
_POLL_SECONDS = 0.005
# So many tokens of a companion for each of a plain request: what is forced goes fast.
_COMPANION_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Together:
    """The results of plain requests beside their companions.

    tokens_per_s: of all plain requests, from sending the first to the last one's end. gap: between two tokens of a
    plain request, in seconds.
    """

    tokens_per_s: float
    gap_p50: float
    gap_p99: float


async def keep_company(
    url: str, requests: int, new_tokens: int, seed: str, *, grammars: bool, running: bool
) -> Together:
    """Runs `requests` plain requests of `new_tokens` tokens beside as many companions, which go on until the end.

    grammars: every companion has one of its own. running: the companions have their first tokens, and so compiled
    grammars, before the others arrive. Raises ServerUnavailable, BadReply.
    """
    random = Random(seed)
    forms = [large_schema(random) if grammars else None for _ in range(requests)]
    if running:  # a token with each grammar first, so that companions with grammars start at one time, too
        await asyncio.gather(*(_ask(Connection(url), _body(random, 1, form)) for form in forms))
    connections = [Connection(url) for _ in forms]
    bodies = [_body(random, new_tokens * _COMPANION_TOKENS, form) for form in forms]
    companions = [asyncio.create_task(_ask(*each)) for each in zip(connections, bodies, strict=True)]
    try:
        while running and not all(each.received for each in connections):
            _raise_failure(companions)
            await asyncio.sleep(_POLL_SECONDS)
        plain = (_ask(Connection(url), _body(random, new_tokens)) for _ in range(requests))
        responses = await asyncio.gather(*plain)
        _raise_failure(companions)
    finally:
        for task in companions:
            task.cancel()
        await asyncio.gather(*companions, return_exceptions=True)
    await asyncio.sleep(_QUIET_SECONDS)  # the server notices that the companions have left
    return _together(responses)


def _raise_failure(companions: Sequence[asyncio.Task[TimedResponse]]) -> None:
    for task in companions:
        if task.done():
            task.result()


def _together(responses: Sequence[TimedResponse]) -> Together:
    seconds = max(each.ended for each in responses) - min(each.started for each in responses)
    times = [read_reply(each).token_times for each in responses]
    gaps = [b - a for moments in times for a, b in itertools.pairwise(moments)]
    return Together(
        tokens_per_s=sum(map(len, times)) / seconds,
        gap_p50=percentile(gaps, 50) or 0.0,
        gap_p99=percentile(gaps, 99) or 0.0,
    )


async def _ask(connection: Connection, body: bytes) -> TimedResponse:
    """Raises BadReply, too, where the response tells of an error."""
    with closing(connection):
        response = await connection.request("POST", "/generate_stream", body)
    read_reply(response)
    return response


def _body(random: Random, new_tokens: int, schema: JsonSchema | None = None) -> bytes:
    grammar = None if schema is None else {"type": "json", "value": schema}
    parameters = {"max_new_tokens": new_tokens, "ignore_eos": True, "grammar": grammar}
    return json.dumps({"inputs": text(random, _WORDS), "parameters": parameters}).encode()
