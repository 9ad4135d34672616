"""Answers that are generated before they are requested, against simulated shards: a wrong block gives wrong tokens."""

import asyncio
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest

from tests.fakes.recording_sink import RecordingSink, recorded_request
from tests.fakes.simulated_shard import SimulatedShard, expected_tokens
from tests.unit.router.scheduling.test_scheduler import House, house
from tgi_server.contract import FinishReason, SamplingParameters
from tgi_server.router.errors import RequestTimedOut, Superseded
from tgi_server.router.submission import KeptPrefix, PreparedRequest

PROMPT = [1, 2] * 9
LATER = 2**31 - 1  # priority

Asked = tuple[PreparedRequest, RecordingSink, asyncio.Event]


async def ask(
    there: House, prompt: list[int] = PROMPT, *, early: int = 0, name: str = "", seconds: float = 60, **more: Any
) -> Asked:
    """Submits a request; for an early answer if `early` tokens are wanted."""
    ended = asyncio.Event()
    more = {"max_new_tokens": 30, "priority": LATER if early else 0} | more
    request, sink = recorded_request(next(there.ids), prompt, on_end=ended.set, **more)
    keep = KeptPrefix(name or f"{prompt}", seconds) if name or early else None
    request = replace(request, early_tokens=early, keep=keep)
    there.scheduler.submit(request, sink)
    await asyncio.sleep(0)
    return request, sink, ended


async def answered(*asked: Asked) -> list[list[int]]:
    """Returns the tokens of requests once they have ended, and checks that early answers have not changed them."""
    await asyncio.wait_for(asyncio.gather(*(ended.wait() for _, _, ended in asked)), 20)
    for request, sink, _ in asked:
        assert sink.error is None
        assert sink.starts == 1
        if not request.early_tokens:
            assert sink.tokens == expected_tokens(request)
    return [sink.tokens for _, sink, _ in asked]


def used(there: House) -> float:
    return there.metric("tgi_early_answer_used_tokens_total")


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 7}])
async def test_a_request_gets_what_is_known_at_once_and_continues(sampling: dict[str, Any]) -> None:
    async with house() as there:
        parameters = SamplingParameters(**sampling)
        (early,) = await answered(await ask(there, early=10, sampling=parameters))
        assert len(early) == 10
        request, sink, ended = await ask(there, sampling=parameters)
        assert sink.tokens == early  # before any step
        assert not ended.is_set()
        await answered((request, sink, ended))
        assert used(there) == len(early) == there.metric("tgi_early_answer_generated_tokens_total")
        again = await ask(there, sampling=parameters)  # it stays, for a request that is sent a second time
        assert again[1].tokens == early
        await answered(again)
        there.scheduler.batch.check()


async def test_a_whole_answer_needs_no_step() -> None:
    async with house() as there:
        await answered(await ask(there, early=30))
        _, sink, ended = await ask(there)
        assert ended.is_set()
        assert sink.reason is FinishReason.LENGTH
        assert len(sink.tokens) == 30


async def test_a_stop_sequence_ends_what_is_known() -> None:
    async with house() as there:
        (early,) = await answered(await ask(there, early=10))
        _, sink, ended = await ask(there, stop_after=4)
        assert ended.is_set()
        assert (sink.reason, sink.tokens) == (FinishReason.STOP_SEQUENCE, early[:4])


async def test_a_request_continues_what_is_being_generated() -> None:
    async with house(step_seconds=0.005) as there:
        _, sink, ended = await ask(there, early=25)
        await there.until(lambda: len(sink.tokens) >= 5)
        known = list(sink.tokens)
        real = await ask(there)
        assert real[1].tokens == known
        assert ended.is_set()
        assert isinstance(sink.error, Superseded)
        await answered(real)
        assert used(there) == len(known)


async def test_a_request_that_comes_before_the_first_token_is_served_as_usual() -> None:
    async with house(step_seconds=0.005) as there:
        _, sink, _ = await ask(there, early=25)
        real = await ask(there)
        assert isinstance(sink.error, Superseded)
        assert not real[1].tokens
        await answered(real)
        assert used(there) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"max_new_tokens": 29},
        {"ignore_eos": False},
        {"cache_namespace": "somebody"},
        {"top_n_tokens": 2},
        {"sampling": SamplingParameters(do_sample=True, seed=8)},
        {"sampling": SamplingParameters(repetition_penalty=1.1)},
        {"prompt": [*PROMPT, 1]},
        {"prompt": PROMPT[:-1]},
    ],
)
async def test_a_request_that_differs_gets_nothing(other: dict[str, Any]) -> None:
    async with house() as there:
        await answered(await ask(there, early=10))
        real = await ask(there, **other)
        assert not real[1].tokens
        await answered(real)
        assert used(there) == 0


async def test_the_seed_of_a_greedy_request_does_not_matter() -> None:
    async with house() as there:
        (early,) = await answered(await ask(there, early=10))
        _, sink, _ = await ask(there, sampling=SamplingParameters(seed=99), trace_context={"traceparent": "00-1-2-03"})
        assert sink.tokens == early


@pytest.mark.parametrize("running", [False, True])
async def test_it_is_thrown_away_when_the_words_change(running: bool) -> None:
    async with house(step_seconds=0.005 if running else 0.0) as there:
        first = await ask(there, early=20, name="turn")
        if running:
            await there.until(lambda: len(first[1].tokens) >= 3)
        else:
            await answered(first)
        other = await ask(there, [*PROMPT, 2], early=5, name="turn")
        assert (first[1].error is not None) is running
        await answered(other)
        real = await ask(there, name="another turn")
        assert not real[1].tokens
        await answered(real)
        assert (await ask(there, [*PROMPT, 2], name="turn"))[1].tokens == other[1].tokens


async def test_it_expires() -> None:
    async with house() as there:
        await answered(await ask(there, early=10, name="turn", seconds=0.02))
        await asyncio.sleep(0.03)
        real = await ask(there)
        assert not real[1].tokens
        await answered(real)


async def test_it_is_forgotten_with_its_namespace() -> None:
    async with house() as there:
        await answered(*[await ask(there, early=10, cache_namespace=name) for name in ("a", "b")])
        assert await there.scheduler.forget("a") == 0
        assert not (await ask(there, cache_namespace="a"))[1].tokens
        assert (await ask(there, cache_namespace="b"))[1].tokens


async def test_a_cancelled_one_stops_and_what_it_has_is_exact() -> None:
    async with house(step_seconds=0.005) as there:
        request, sink, _ = await ask(there, early=25)
        await there.until(lambda: len(sink.tokens) >= 3)
        assert there.scheduler.cancel(request.id)
        known = list(sink.tokens)
        await there.until(lambda: there.metric("tgi_batch_current_size") == 0)
        assert sink.tokens == known
        real = await ask(there)
        assert real[1].tokens == known
        assert not sink.ended  # nothing is told to one that has left
        await answered(real)


async def test_it_gives_way_to_requests_and_goes_on_later() -> None:
    async with house(step_seconds=0.002, max_batch_size=2) as there:
        early = await ask(there, early=25)
        await there.until(lambda: len(early[1].tokens) >= 3)
        others = [await ask(there, [2, 1] * 5, max_new_tokens=12 + number) for number in range(6)]
        await answered(*others)
        assert not early[2].is_set()
        await answered(early)
        assert there.metric("tgi_batch_preemption_count_total") >= 1
        await answered(await ask(there))
        assert used(there) >= 25


async def test_a_deadline_ends_it() -> None:
    async with house(step_seconds=0.01) as there:
        deadline = perf_counter() + 0.2
        _, sink, ended = await ask(there, early=30, deadline=deadline)
        await asyncio.wait_for(ended.wait(), 10)
        assert isinstance(sink.error, RequestTimedOut)
        real = await ask(there)
        assert real[1].tokens == sink.tokens
        await answered(real)


async def test_only_so_many_are_kept() -> None:
    async with house(SimulatedShard(256, 4)) as there:
        prompts = [[1 + (number >> bit & 1) for bit in range(8)] for number in range(70)]
        for prompt in prompts:
            await answered(await ask(there, prompt, early=2, max_new_tokens=4))
        known = [bool((await ask(there, prompt, max_new_tokens=4))[1].tokens) for prompt in prompts]
        assert known == [False] * 6 + [True] * 64
