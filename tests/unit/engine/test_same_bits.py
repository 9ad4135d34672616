"""A request's tokens and log-probabilities on a CPU depend on the request and the model, and on nothing else.

Schedules are random: requests join at different steps, beside others, in chunks, behind cached prefixes, with drafts
and without, with adapters and beside them, on one thread or several; some are preempted and come back, some are
cancelled. What each gets is compared bit by bit with what it gets alone.
"""

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from tests.adapters import make_adapter
from tests.quantized_models import make_quantized
from tests.tiny_models import VOCAB_SIZE, make
from tests.unit.engine.request_kinds import resumed
from tests.unit.engine.requests import load_engine, load_reference
from tgi_server.contract import BlockCopy, ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.speculation.costs import StepCosts
from tgi_server.engine.speculation.drafters import Drafter
from tgi_server.engine.step import Generation

pytestmark = pytest.mark.skipif(not load_kernels(), reason="the CPU kernels are not available")

MODELS = ("float32", "bfloat16", "int4", "gptq", "gptq in float32")
# Of all models together.
SCHEDULES, MANY_SCHEDULES = 200, 10_000
# Attention goes over 128 tokens at a time: lengths lie on both sides of its multiples.
LENGTHS = (3, 17, 31, 100, 127, 128, 129, 140, 200, 257, 300)
NEW = 7
ADAPTERS = ("first", "second")
KINDS = (
    (SamplingParameters(), ReportParameters(logprobs=True, top_n_tokens=2)),
    (SamplingParameters(), ReportParameters()),
    (SamplingParameters(do_sample=True, temperature=1.3, top_p=0.9, seed=5), ReportParameters(logprobs=True)),
    (SamplingParameters(repetition_penalty=1.2, presence_penalty=0.3), ReportParameters(logprobs=True)),
)

Outputs = list[tuple[int, float | None, list[tuple[int, float]]]]


class Guesses(Drafter):
    """Knows what requests are going to get, and is wrong now and then."""

    def __init__(self) -> None:
        self.replies: dict[int, list[int]] = {}
        self.numbers = random.Random(0)

    def propose(self, room: Mapping[RunningSequence, int]) -> dict[RunningSequence, list[int]]:
        return {sequence: self._guess(sequence, most) for sequence, most in room.items()}

    def _guess(self, sequence: RunningSequence, count: int) -> list[int]:
        known = self.replies.get(sequence.request_id, [])[sequence.generated :][: self.numbers.randrange(count + 1)]
        return [token if self.numbers.random() < 0.8 else self.numbers.randrange(VOCAB_SIZE) for token in known]


@dataclass
class Model:
    """The same model without drafts and with them, and what each request of `prompts` gets from it alone."""

    engines: tuple[Engine, Engine]
    guesses: Guesses
    prompts: list[list[int]]
    alone: dict[tuple[int, int, str], Outputs] = field(default_factory=dict)

    def request(self, request_id: int, prompt: int, kind: int, adapter: str) -> RunningSequence:
        sampling, report = KINDS[kind]
        stopping = StoppingParameters(NEW, ignore_eos=True)
        return RunningSequence(request_id, self.prompts[prompt], stopping, sampling, report, adapter_id=adapter)

    def expected(self, prompt: int, kind: int, adapter: str) -> Outputs:
        key = prompt, kind, adapter
        if key not in self.alone:
            torch.set_num_threads(1)
            driver = Driver(self.engines[0])
            [output] = driver.run(self.request(0, prompt, kind, adapter))
            self.alone[key] = list(map(_of, output.generations))
        return self.alone[key]


def _of(generation: Generation) -> tuple[int, float | None, list[tuple[int, float]]]:
    top = generation.top_tokens
    return generation.token_id, generation.logprob, [] if top is None else list(zip(top.ids, top.logprobs, strict=True))


def _folder(name: str, folder: Path) -> tuple[Path, dict[str, object]]:
    dtype = {"dtype": torch.float32 if "float32" in name else torch.bfloat16}
    if "gptq" in name:
        return make_quantized("gptq", folder, max_position_embeddings=512)[0], dtype
    make("llama", folder / "dense", max_position_embeddings=512)
    quantized = {"quantize": "int4"} if "int4" in name else {}
    return folder / "dense", dtype | quantized | ({"linear_kernels": "w4a16,fma@3"} if "mixed" in name else {})


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("model")
    path, settings = _folder(request.param, folder)
    reference = load_reference(folder / "dense")
    numbers = random.Random(3)
    longest = [numbers.randrange(3, VOCAB_SIZE) for _ in range(max(LENGTHS))]
    prompts = [longest[:length] for length in LENGTHS]  # each continues those before it
    engines = load_engine(path, **settings), load_engine(path, speculate=4, **settings)
    guesses, threads = Guesses(), torch.get_num_threads()
    engines[1].speculation.drafters = [guesses]
    for engine in engines:
        engine.warm_up(max_batch_size=8, max_prefill_tokens=1024, max_total_tokens=512)
        for seed, name in enumerate(ADAPTERS):
            adapter, _ = make_adapter(
                reference, folder / name, seed=seed, r=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]
            )
            engine.adapters.put(name, engine.adapters.fetch(name, adapter))
    yield Model(engines, guesses, prompts)
    torch.set_num_threads(threads)


class Schedule:
    """Runs some requests in a random way. outputs: what each got, by its number."""

    def __init__(self, model: Model, seed: int) -> None:
        self.numbers = random.Random(seed)
        self.outputs: dict[int, Outputs] = {}
        self.requests = [
            (self.numbers.randrange(len(LENGTHS)), self.numbers.randrange(len(KINDS)), self._adapter())
            for _ in range(self.numbers.randint(1, 5))
        ]
        self.cancelled: set[int] = set()
        self.seen: Counter[str] = Counter(adapted=sum(bool(adapter) for *_, adapter in self.requests))
        self._model = model
        engine = model.engines[self.numbers.randrange(2)]
        if engine.speculation is not None:
            engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
        model.guesses.numbers = self.numbers
        model.guesses.replies = {
            number: [token for token, *_ in model.expected(*request)] for number, request in enumerate(self.requests)
        }
        self._driver = Driver(engine, blocks=())
        self._free = list(range(1, engine.capacity.num_blocks + 1))
        self.numbers.shuffle(self._free)
        self._cached: list[tuple[list[int], str, list[int]]] = []  # tokens, adapter, blocks

    def run(self) -> None:
        torch.set_num_threads(self.numbers.choice((1, 2, 3)))
        waiting = [self._model.request(number, *request) for number, request in enumerate(self.requests)]
        running: dict[int, RunningSequence] = {}
        while waiting or self._driver.busy:
            while waiting and (not self._driver.busy or self.numbers.random() < 0.3):
                sequence = waiting.pop(0)
                self._join(sequence)
                running[sequence.request_id] = sequence
            for generation in self._driver.step(decode=self.numbers.random() < 0.9):
                if generation.request_id in running:
                    self.outputs.setdefault(generation.request_id, []).append(_of(generation))
                    if generation.finish_reason:
                        self._keep(running.pop(generation.request_id))
            for number, sequence in list(running.items()):
                chance = self.numbers.random()
                if chance < 0.06 and not sequence.ended:
                    del running[number]
                    self._driver.leave(number)
                    self._keep(sequence)
                    if chance < 0.02:
                        self.cancelled.add(number)
                        self.seen["cancelled"] += 1
                    else:
                        waiting.append(resumed(sequence))
                        self.seen["preempted"] += 1
        self.seen["drafted"] += self._driver.accepted
        self.seen["wrongly drafted"] += self._driver.drafted - self._driver.accepted

    def _adapter(self) -> str:
        return self.numbers.choice(("", "", *ADAPTERS))

    def _keep(self, sequence: RunningSequence) -> None:
        """Stores the blocks of what has been computed, as the prefix cache does."""
        known = [*sequence.input_ids, *sequence.generated_ids]
        tokens = known[:-1] if sequence.remaining <= 0 else known[: sequence.computed]
        self._cached.append((tokens, sequence.adapter_id, sequence.blocks))

    def _join(self, sequence: RunningSequence) -> None:
        known, size = sequence.known.tolist(), self._driver.engine.info.block_size
        needed = -(-(len(sequence.input_ids) + NEW) // size)
        shared, blocks = 0, list[int]()
        if self.numbers.random() < 0.7:
            for tokens, adapter, theirs in self._cached:
                differ = (place for place, (a, b) in enumerate(zip_longest(tokens, known)) if a != b)
                common = next(differ, len(known))
                if adapter == sequence.adapter_id and common > shared:
                    shared, blocks = min(common, len(known) - 1), theirs
        self.seen["cached"] += bool(shared)
        whole = shared // size
        own = [self._free.pop() for _ in range(needed - whole)]
        if shared % size:
            sequence.copy = BlockCopy(blocks[whole], own[0], shared % size)
        sequence.blocks, sequence.computed = [*blocks[:whole], *own], shared
        chunks = self._chunks(sequence.remaining)
        self.seen["cut"] += len(chunks) > 1
        self._driver.add(sequence, chunks)

    def _chunks(self, tokens: int) -> list[int]:
        chunks = []
        while tokens and self.numbers.random() < 0.7:
            chunks.append(self.numbers.randint(1, tokens))
            tokens -= chunks[-1]
        return [*chunks, tokens] if tokens else chunks


def differences(model: Model, schedules: int) -> tuple[list[str], Counter[str]]:
    """Runs schedules. Returns which requests got something else than alone, and how often each thing happened."""
    found, seen = [], Counter[str]()
    for seed in range(schedules):
        schedule = Schedule(model, seed)
        schedule.run()
        seen += schedule.seen
        for number, request in enumerate(schedule.requests):
            actual, wanted = schedule.outputs.get(number, []), model.expected(*request)
            if actual != (wanted[: len(actual)] if number in schedule.cancelled else wanted):
                found.append(f"schedule {seed}, request {number}: {request}")
    return found, seen


def test_no_schedule_changes_a_bit(model: Model, request: pytest.FixtureRequest) -> None:
    schedules = MANY_SCHEDULES if request.config.getoption("--runslow") else SCHEDULES
    found, seen = differences(model, schedules // len(MODELS))
    assert not found
    assert all(
        seen[each] for each in ("adapted", "cancelled", "preempted", "drafted", "wrongly drafted", "cached", "cut")
    )


@pytest.mark.parametrize("model", ["int4, mixed"], indirect=True)
def test_kernels_that_differ_in_their_last_bits_are_found(model: Model) -> None:
    found, _ = differences(model, 10)
    assert found


STARTS = """
import json, sys
import torch
from pathlib import Path
from tgi_server.contract import ReportParameters, StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.driver import Driver

torch.set_num_threads(int(sys.argv[2]))
engine = Engine(EngineConfig(Path(sys.argv[1]), dtype=torch.bfloat16, quantize="int4"))
engine.warm_up(max_batch_size=4, max_prefill_tokens=512, max_total_tokens=512)
report = ReportParameters(logprobs=True)
prompts = [list(range(3, 3 + length)) for length in (5, 60, 150)]
requests = [RunningSequence(n, prompt, StoppingParameters(20, True), report=report) for n, prompt in enumerate(prompts)]
outputs = Driver(engine).run(*requests)
print(json.dumps([[(each.token_id, each.logprob) for each in output.generations] for output in outputs]))
"""


@pytest.mark.slow
def test_three_starts_give_the_same_bits(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model", max_position_embeddings=512, hidden_size=512, intermediate_size=1408)
    results = [
        subprocess.run(
            [sys.executable, "-c", STARTS, folder, threads], capture_output=True, text=True, check=True
        ).stdout
        for threads in ("1", "2", "2")
    ]
    assert len(json.loads(results[0])) == 3
    assert results[0] == results[1] == results[2]
