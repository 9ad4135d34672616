"""Models whose sequences have states beside keys and values: the states are right however a text is computed."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make
from tests.unit.engine.request_kinds import resumed
from tests.unit.engine.requests import MAX_TOTAL_TOKENS, NEW, expected_tokens, load_engine, prompts
from tgi_server.contract import ReportParameters, StateSave, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import InvalidCall, NotEnoughMemory
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.speculation.costs import StepCosts
from tgi_server.engine.speculation.drafters import Drafter

# One of each kind: gated delta rule, convolution alone, Mamba-2 beside attention in every layer, Mamba, Kimi's rule.
FAMILIES = ["qwen3_next", "lfm2", "falcon_h1", "jamba", "kimi_linear"]
TEXTS = prompts((33, 5, 12, 70))


@dataclass(slots=True)
class Case:
    """A tiny model, what it replies to each text, and the shards over which it is split."""

    folder: Path
    replies: list[list[int]]
    group: ShardGroup | None = None

    def load(self, **settings) -> Engine:
        engine = load_engine(self.folder, group=self.group, **settings)
        engine.warm_up(max_batch_size=len(TEXTS), max_prefill_tokens=256, max_total_tokens=MAX_TOTAL_TOKENS)
        return engine


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=[] if each == "qwen3_next" else pytest.mark.slow) for each in FAMILIES],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make(request.param, tmp_path_factory.mktemp(request.param))
    return Case(folder, expected_tokens(folder, TEXTS))


@pytest.fixture(scope="module")
def engine(case: Case) -> Engine:
    return case.load()


def sequences(**settings) -> Iterator[RunningSequence]:
    stopping = StoppingParameters(NEW, ignore_eos=True)
    return (RunningSequence(index, text, stopping, **settings) for index, text in enumerate(TEXTS))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_prompts_in_chunks(engine: Engine, case: Case, size: int) -> None:
    driver = Driver(engine)
    for each in sequences():
        driver.add(each, [min(size, each.remaining - start) for start in range(0, each.remaining, size)])
        driver.step()
    driver.run()
    assert [driver.outputs[index].tokens for index in range(len(TEXTS))] == case.replies


def test_sequences_that_are_preempted_at_any_step_are_computed_anew(engine: Engine, case: Case) -> None:
    driver, running = Driver(engine), {each.request_id: each for each in sequences()}
    written: dict[int, list[int]] = {index: [] for index in running}
    for each in running.values():
        driver.add(each)
    step = 0
    while driver.busy:
        for generation in driver.step():
            written[generation.request_id].append(generation.token_id)
        step += 1
        leaving = running[step % len(TEXTS)]
        if not leaving.ended:
            driver.leave(leaving.request_id)
            running[leaving.request_id] = resumed(leaving)
            driver.add(running[leaving.request_id])
    assert list(written.values()) == case.replies


class Guesses(Drafter):
    """Knows the replies, and guesses them wrong now and then."""

    def __init__(self, replies: list[list[int]]) -> None:
        self._replies = replies

    def propose(self, room: Mapping[RunningSequence, int]) -> dict[RunningSequence, list[int]]:
        return {
            each: [self._guess(each.request_id, place) for place in range(each.generated, each.generated + tokens)]
            for each, tokens in room.items()
        }

    def _guess(self, request: int, place: int) -> int:
        right = place + 1 < NEW and random.Random(f"{request}/{place}").random() < 0.7
        return self._replies[request][place + 1 if right else 0]


@pytest.mark.parametrize("tokens", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_wrong_drafts_leave_no_trace(case: Case, tokens: int) -> None:
    engine = case.load(speculate=tokens)
    assert engine.speculation is not None
    engine.speculation.drafters = [Guesses(case.replies)]
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    driver = Driver(engine)
    for each in sequences():
        driver.add(each, [each.remaining - 2, 2])
        driver.step()
    driver.run()
    assert [driver.outputs[index].tokens for index in range(len(TEXTS))] == case.replies
    assert 0 < driver.accepted < driver.drafted


def test_sequences_that_left_give_their_slots_to_others(engine: Engine, case: Case) -> None:
    for _ in range(3):
        driver = Driver(engine)
        for each in sequences():
            driver.add(each, [2, each.remaining - 2])
        driver.step()
        engine.clear()
    assert [output.tokens for output in Driver(engine).run(*sequences())] == case.replies


def test_tokens_whose_state_is_not_there_must_be_computed(engine: Engine) -> None:
    engine.clear()
    shared = RunningSequence(0, TEXTS[0], StoppingParameters(NEW), blocks=[1, 2], computed=32)
    with pytest.raises(InvalidCall, match="request 0: 32 cached tokens with snapshot 0"):
        engine.step(1, [shared], [(0, 1)])


def test_states_count_when_memory_is_planned(tmp_path: Path) -> None:
    engine = load_engine(make("qwen3_next", tmp_path), cpu_memory=1 << 17)
    few, more = (engine.warm_up(max_batch_size=size, max_prefill_tokens=16) for size in (2, 8))
    assert 0 < more.max_batch_total_tokens < few.max_batch_total_tokens
    with pytest.raises(NotEnoughMemory, match=r"beside the states of 4096 sequences.*or --max-batch-size"):
        engine.warm_up(max_batch_size=4096, max_prefill_tokens=16)


def drain(engine: Engine, batch: int = 1) -> list[int]:
    """Decodes until nothing runs. Returns the tokens of the only sequence."""
    tokens = []
    while engine.batch:
        tokens += [each.token_id for each in engine.step(batch).collect().generations]
    return tokens


def test_a_prefix_is_continued_from_any_snapshot(engine: Engine, case: Case) -> None:
    """Some are made in the middle of a chunk, some between two, and one while the sequence decodes."""
    engine.clear()
    text, reply = TEXTS[3], case.replies[3]
    stopping = StoppingParameters(NEW, ignore_eos=True)
    blocks = range(1, 1 + 128 // engine.info.block_size)
    first = RunningSequence(7, text, stopping, blocks=list(blocks))
    engine.step(1, [first], [(7, 40)], saves=[StateSave(7, 7, 1), StateSave(7, 32, 2), StateSave(7, 40, 3)])
    saves = [StateSave(7, 40, 4), StateSave(7, 64, 5)]
    tokens = [each.token_id for each in engine.step(1, [], [(7, 30)], saves=saves).collect().generations]
    engine.step(1, saves=[StateSave(7, 70, 6)]).collect()
    engine.clear()
    # The blocks are those of the first one: what is computed again is written where the same stands.
    for snapshot, length in {1: 7, 2: 32, 3: 40, 4: 40, 5: 64, 6: 70}.items():
        said = [*text, reply[0]]
        again = RunningSequence(8, text, stopping, generated_ids=reply[:1], blocks=list(blocks))
        again.computed, again.snapshot = length, snapshot
        step = engine.step(1, [again], [(8, len(said) - length)])
        assert [*(each.token_id for each in step.collect().generations), *drain(engine)] == reply[1:], f"from {length}"
    assert tokens == reply[:1]
    for number in (0, 10_000):
        other = RunningSequence(9, text, stopping, blocks=list(blocks))
        with pytest.raises(InvalidCall, match=rf"snapshot {number} does not exist; snapshots go from 1 to \d+"):
            engine.step(1, [other], [(9, 7)], saves=[StateSave(9, 7, number)])


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bamba", "falcon_h1", "lfm2"))]
)
@pytest.mark.skipif(not load_kernels(), reason="the CPU kernels are not available")
def test_the_kernels_give_a_text_the_same_bits_in_any_company(family: str, tmp_path: Path) -> None:
    engine = load_engine(make(family, tmp_path / family), dtype=torch.bfloat16)
    engine.warm_up(max_batch_size=len(TEXTS), max_prefill_tokens=256, max_total_tokens=MAX_TOTAL_TOKENS)
    report = ReportParameters(logprobs=True)
    alone = [output.generations for each in sequences(report=report) for output in Driver(engine).run(each)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    driver = Driver(engine)
    for size, each in zip((7, 5, 1, 33), sequences(report=report), strict=True):
        driver.add(each, [min(size, each.remaining - start) for start in range(0, each.remaining, size)])
        driver.step()
    driver.run()
    torch.set_num_threads(threads)
    for index, expected in enumerate(alone):
        found = [(each.token_id, each.logprob) for each in driver.outputs[index].generations]
        assert found == [(each.token_id, each.logprob) for each in expected], index
