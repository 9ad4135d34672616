"""Shards get their tokens at different times, and compute the same rows in every step all the same.

A call may reach one shard before it has its tokens of the step before, and another shard after.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.stubs import generate_pb2 as pb
from tests.tiny_models import make
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.requests import load_engine
from tgi_server import demo_model
from tgi_server.engine import Engine, EngineConfig, Step
from tgi_server.engine.batch import RunningBatch
from tgi_server.engine.parallel import ShardGroup
from tgi_server.shard.call_stream import CallStream

# Sequences of a script.
MOST = 24


@dataclass(frozen=True)
class Scripted:
    """A call, and when it comes.

    joining: the new tokens of sequences that join. keep: ids; None: a step. unanswered: it is sent before the router
    has heard of the last call's end.
    """

    joining: tuple[int, ...] = ()
    keep: tuple[int, ...] | None = None
    unanswered: bool = True


def messages(script: Sequence[Scripted]) -> list[pb.Call]:
    calls, ids = [], iter(range(MOST))
    for number, scripted in enumerate(script):
        if scripted.keep is not None:
            call = pb.Call(filter_batch=pb.FilterBatchRequest(batch_id=1, keep_request_ids=scripted.keep))
        elif scripted.joining:
            requests = [
                pb.Request(id=i, input_ids=[3 + i, 40, 77], max_new_tokens=new, ignore_eos=True, block_ids=[1 + i])
                for i, new in zip(ids, scripted.joining, strict=False)
            ]
            chunks = [pb.Chunk(request_id=request.id, tokens=3) for request in requests]
            call = pb.Call(prefill=pb.PrefillRequest(batch_id=1, requests=requests, chunks=chunks, decode=True))
        else:
            call = pb.Call(decode=pb.DecodeRequest(batch_id=1))
        call.answered = max(0, number - scripted.unanswered)
        calls.append(call)
    return calls


async def run(
    engine: Engine, script: Sequence[Scripted], tokens_first: Sequence[bool], *, alone: bool
) -> tuple[list[pb.Answer], list[list[int]]]:
    """Returns the answers, and the rows of each step.

    tokens_first: of each call, whether the shard has the tokens of the one before when it comes.
    """
    calls = messages(script)
    waits = [threading.Event() for _ in calls]
    received = [asyncio.Event() for _ in calls]
    started: list[Step] = []
    rows: list[list[int]] = []
    plan, start = RunningBatch.plan, engine.step

    def recorded(batch: RunningBatch, *arguments, **options):
        planned = plan(batch, *arguments, **options)
        rows.append([sequence.request_id for sequence in planned.sequences])
        return planned

    def numbered(*arguments, **options) -> Step:
        step = start(*arguments, **options)
        step.number = number  # type: ignore[attr-defined]
        started.append(step)
        return step

    number = 0

    async def incoming() -> AsyncIterator[pb.Call]:
        nonlocal number
        for number, call in enumerate(calls):
            if call.answered:
                if call.answered == number:
                    waits[number - 1].set()
                await received[call.answered - 1].wait()
            if number and tokens_first[number]:
                waits[number - 1].set()
                await received[number - 1].wait()
            yield call
            if number:
                waits[number - 1].set()
        waits[-1].set()

    def wait(step: Step) -> None:
        assert waits[step.number].wait(20)  # type: ignore[attr-defined]

    answers: list[pb.Answer] = []
    with (
        patch.object(RunningBatch, "plan", recorded),
        patch.object(engine, "step", numbered),
        patch.object(engine, "info", replace(engine.info, device_type="cuda")),
        patch.object(Step, "synchronize", wait),
    ):
        stream = CallStream(engine, None, alone=alone)
        async for answer in stream.answers(incoming()):
            received[len(answers)].set()
            answers.append(answer)
        stream.end(None)
    return answers, rows


def tokens(answers: Sequence[pb.Answer]) -> dict[int, list[int]]:
    found = defaultdict(list)
    for answer in answers:
        for generation in answer.step.generations:
            found[generation.request_id] += generation.token_ids
    return dict(found)


def in_turn(engine: Engine, script: Sequence[Scripted]) -> dict[int, list[int]]:
    """Returns the tokens of each sequence when every call waits for the answer to the one before."""
    patient = [replace(scripted, unanswered=False) for scripted in script]
    answers, _ = asyncio.run(run(engine, patient, [True] * len(script), alone=True))
    return tokens(answers)


def warm(engine: Engine) -> Engine:
    engine.warm_up(max_batch_size=MOST, max_prefill_tokens=64, max_total_tokens=32)
    return engine


STEP = Scripted()
SCRIPT = [
    Scripted(joining=(2, 5, 3, 9, 4)),
    STEP,
    STEP,
    Scripted(joining=(3, 1)),
    Scripted(keep=(1, 3, 4, 5, 6)),
    STEP,
    replace(STEP, unanswered=False),
    Scripted(keep=(3, 5)),
    STEP,
    STEP,
    Scripted(joining=(2,)),
    STEP,
    STEP,
]


def shard(group: ShardGroup, folder: Path, orders: Sequence[Sequence[bool]]) -> tuple[list[bytes], list[list[int]]]:
    engine = warm(load_engine(folder, group=group))
    answers, rows = asyncio.run(run(engine, SCRIPT, orders[group.rank], alone=False))
    for answer in answers:
        answer.step.ClearField("timings")
    return [answer.SerializeToString() for answer in answers], rows


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_shards_compute_the_same_rows(first: bool, ranks_of: RanksOf, tmp_path: Path) -> None:
    """One of them has its tokens first whenever the other has not, in turns."""
    folder = make("llama", tmp_path)
    orders = [[first ^ bool(number // 3 % 2) for number in range(len(SCRIPT))]]
    orders.append([not each for each in orders[0]])
    (answers, rows), (others, other_rows) = ranks_of(2).run(shard, folder, orders)
    assert rows == other_rows
    assert answers == others
    expected = in_turn(warm(load_engine(folder)), SCRIPT)
    assert tokens([pb.Answer.FromString(answer) for answer in answers]) == expected


@pytest.fixture(scope="module")
def engine() -> Engine:
    return warm(Engine(EngineConfig(demo_model.PATH, dtype=torch.float32)))


CALLS = st.one_of(
    st.builds(Scripted, unanswered=st.booleans()),
    st.builds(Scripted, joining=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)),
    st.builds(Scripted, keep=st.sets(st.integers(0, MOST - 1), min_size=MOST // 2).map(tuple)),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    script=st.lists(st.tuples(CALLS, st.booleans(), st.booleans()), min_size=2, max_size=8),
)
def test_the_order_of_calls_and_tokens_changes_nothing(engine: Engine, script) -> None:
    calls = [Scripted(joining=(2, 5, 3)), *(call for call, _, _ in script)]
    expected = in_turn(engine, calls)
    lone, _ = asyncio.run(run(engine, calls, [True, *(first for _, first, _ in script)], alone=True))
    assert tokens(lone) == expected
    answers, rows = asyncio.run(run(engine, calls, [True, *(first for _, first, _ in script)], alone=False))
    others, other_rows = asyncio.run(run(engine, calls, [True, *(other for _, _, other in script)], alone=False))
    assert rows == other_rows
    assert tokens(answers) == tokens(others) == expected
