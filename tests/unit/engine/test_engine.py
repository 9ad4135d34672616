"""The engine through its own interface, on the bundled model in float32."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import make
from tgi_server import demo_model
from tgi_server.contract import BlockCopy, FinishReason, ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, EngineConfig, Generation, RunningSequence
from tgi_server.engine.errors import InvalidCall, InvalidWeights, ModelNotFound, NotEnoughMemory, UnsupportedModel
from tgi_server.engine.offline import generate

PROMPTS = [[1, 40, 77, 300], [1, *range(50, 90)], [1, 5], [1, *range(400, 480)], [1, 99, 98, 97, 96, 95]]
NEW = 24


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32))
    engine.warm_up(max_batch_size=8, max_prefill_tokens=256, max_total_tokens=512)
    return engine


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What transformers generates for each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)
    outputs = []
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


class Driver:
    """Gives sequences blocks of their own and collects what they generate."""

    def __init__(self, engine: Engine) -> None:
        engine.clear()
        self.engine = engine
        self.outputs: dict[int, list[int]] = {}
        self.generations: list[Generation] = []
        self._next_block = 1

    def sequence(self, request_id: int, prompt: list[int], new: int = NEW, **options) -> RunningSequence:
        count = -(-(len(prompt) + new) // self.engine.info.block_size)
        blocks = list(range(self._next_block, self._next_block + count))
        self._next_block += count
        self.outputs.setdefault(request_id, [])
        stopping = StoppingParameters(new, ignore_eos=options.pop("ignore_eos", True))
        return RunningSequence(request_id, prompt, stopping, blocks=blocks, **options)

    def take(self, step) -> list[Generation]:
        result = step.collect()
        for generation in result.generations:
            self.outputs[generation.request_id].append(generation.token_id)
        self.generations += result.generations
        return result.generations

    def prefill(self, *sequences: RunningSequence, decode: bool = True) -> list[Generation]:
        chunks = [(sequence.request_id, sequence.remaining) for sequence in sequences]
        return self.take(self.engine.step(1, sequences, chunks, decode=decode))

    def drain(self) -> None:
        while self.engine.batch:
            self.take(self.engine.step(1))


def test_sequences_that_join_and_leave_at_different_steps_get_the_tokens_of_transformers(engine, expected) -> None:
    driver = Driver(engine)
    driver.prefill(driver.sequence(0, PROMPTS[0]))
    driver.take(engine.step(1))
    driver.prefill(driver.sequence(1, PROMPTS[1]), driver.sequence(2, PROMPTS[2], new=3))
    driver.prefill(driver.sequence(3, PROMPTS[3]), decode=False)
    for _ in range(4):
        driver.take(engine.step(1))
    driver.prefill(driver.sequence(4, PROMPTS[4]))
    driver.drain()
    expected = [*expected[:2], expected[2][:3], *expected[3:]]
    assert [driver.outputs[index] for index in range(5)] == expected
    assert {generation.finish_reason for generation in driver.generations} == {None, FinishReason.LENGTH}


def test_a_prompt_in_chunks_beside_a_running_sequence(engine, expected) -> None:
    driver = Driver(engine)
    driver.prefill(driver.sequence(0, PROMPTS[0]))
    for index, tokens in enumerate((30, 1, 50)):
        joining = [driver.sequence(3, PROMPTS[3])] if index == 0 else []
        driver.take(engine.step(1, joining, [(3, tokens)]))
    driver.drain()
    assert driver.outputs == {0: expected[0], 3: expected[3]}


def test_the_next_step_may_start_before_the_last_one_is_collected(engine, expected) -> None:
    driver = Driver(engine)
    started = [engine.step(1, [driver.sequence(0, PROMPTS[0], new=2)], [(0, 4)])]
    started.append(engine.step(1, [driver.sequence(1, PROMPTS[1])], [(1, len(PROMPTS[1]))]))
    for _ in range(NEW):
        driver.take(started.pop(0))
        started.append(engine.step(1))
    for step in started:
        driver.take(step)
    assert driver.outputs == {0: expected[0][:2], 1: expected[1]}


def test_a_sequence_resumes_where_it_was_interrupted(engine, expected) -> None:
    driver = Driver(engine)
    driver.prefill(driver.sequence(1, PROMPTS[1]))
    for _ in range(6):
        driver.take(engine.step(1))
    engine.keep(1, [])
    done = driver.outputs[1][:]
    driver.prefill(driver.sequence(1, PROMPTS[1], generated_ids=done))
    driver.drain()
    assert driver.outputs[1] == expected[1]


def test_a_prefix_that_is_cached_already_is_not_computed_again(engine, expected) -> None:
    driver = Driver(engine)
    first = driver.sequence(3, PROMPTS[3])
    driver.prefill(first)
    size = engine.info.block_size
    shared = len(PROMPTS[3]) // size
    rest = len(PROMPTS[3]) - 1 - shared * size
    second = driver.sequence(4, PROMPTS[3], computed=len(PROMPTS[3]) - 1)
    second.copy = BlockCopy(first.blocks[shared], second.blocks[shared], rest)
    second.blocks[:shared] = first.blocks[:shared]
    assert rest > 0
    driver.prefill(second)
    driver.drain()
    assert driver.outputs == {3: expected[3], 4: expected[3]}


def test_blocks_granted_as_a_sequence_grows(engine, expected) -> None:
    driver = Driver(engine)
    sequence = driver.sequence(1, PROMPTS[1], NEW)
    granted, sequence.blocks = sequence.blocks[2:], sequence.blocks[:2]
    size = engine.info.block_size
    driver.prefill(sequence)
    position = len(PROMPTS[1])
    while engine.batch:
        grants = [(1, [granted.pop(0)])] if position % size == 0 and position // size >= 2 and granted else []
        driver.take(engine.step(1, grants=grants))
        position += 1
    assert driver.outputs[1] == expected[1]


def test_an_end_of_sequence_token_ends_a_sequence_unless_it_is_ignored(engine) -> None:
    eos = engine.info.eos_token_ids[0]
    driver = Driver(engine)
    # A bias that no logit overcomes makes the token certain.
    sampling = SamplingParameters(logit_bias={eos: 1000.0})
    driver.prefill(driver.sequence(0, PROMPTS[0], sampling=sampling, ignore_eos=False))
    driver.prefill(driver.sequence(1, PROMPTS[0], new=3, sampling=sampling))
    driver.drain()
    assert driver.outputs == {0: [eos], 1: [eos] * 3}
    assert [g.finish_reason for g in driver.generations if g.request_id == 0] == [FinishReason.EOS_TOKEN]


def test_the_same_seed_gives_the_same_tokens_whatever_else_runs(engine) -> None:
    sampling = SamplingParameters(do_sample=True, temperature=1.5, seed=7)
    alone = Driver(engine)
    alone.prefill(alone.sequence(0, PROMPTS[0], sampling=sampling))
    alone.drain()
    among = Driver(engine)
    among.prefill(among.sequence(1, PROMPTS[1]), among.sequence(0, PROMPTS[0], sampling=sampling))
    among.prefill(among.sequence(2, PROMPTS[2], sampling=SamplingParameters(do_sample=True, seed=8)))
    among.drain()
    assert among.outputs[0] == alone.outputs[0]


def test_logprobs_of_prompt_and_tokens_are_those_of_the_model(engine) -> None:
    driver = Driver(engine)
    report = ReportParameters(logprobs=True, top_n_tokens=3, prefill_logprobs=True)
    prompt = PROMPTS[1]
    half = len(prompt) // 2
    driver.take(engine.step(1, [driver.sequence(0, prompt, new=2, report=report)], [(0, half)]))
    [generation] = driver.take(engine.step(1, [], [(0, len(prompt) - half)]))
    model = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert generation.prompt_tokens.ids == prompt
    assert math.isnan(generation.prompt_tokens.logprobs[0])
    assert generation.prompt_tokens.logprobs[1:] == pytest.approx(wanted, abs=1e-3)
    assert generation.logprob == pytest.approx(float(logprobs[-1].max()), abs=1e-3)
    assert generation.top_tokens.ids == logprobs[-1].topk(3).indices.tolist()
    assert generation.top_tokens.logprobs == pytest.approx(logprobs[-1].topk(3).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_of_a_large_vocabulary_the_same_tokens_are_chosen_whether_all_logits_are_wanted_or_not(
    architecture, tmp_path
) -> None:
    folder = make(architecture, tmp_path / "model", vocab_size=40_000, hidden_size=128)
    engine = Engine(EngineConfig(folder, dtype=torch.bfloat16))
    engine.warm_up(max_batch_size=8, max_prefill_tokens=256, max_total_tokens=256)
    wishes = {
        "greedy": [{}] * 5,
        "reported": [{"report": ReportParameters(logprobs=True)}] * 5,
        "mixed": [{}, {"sampling": SamplingParameters(do_sample=True, temperature=2.0, seed=1)}, {}, {}, {}],
    }
    outputs = {}
    for name, options in wishes.items():
        driver = Driver(engine)
        for index, prompt in enumerate(PROMPTS):
            driver.prefill(driver.sequence(index, prompt, **options[index]))
        driver.drain()
        outputs[name] = driver.outputs
    assert outputs["greedy"] == outputs["reported"]
    assert outputs["mixed"].pop(1) != outputs["greedy"].pop(1)
    assert outputs["mixed"] == outputs["greedy"]


def test_calls_that_contradict_the_batch_are_refused_and_the_engine_goes_on(engine, expected) -> None:
    driver = Driver(engine)
    driver.prefill(driver.sequence(0, PROMPTS[0]))
    with pytest.raises(InvalidCall, match="no prompt left"):
        engine.step(1, [], [(0, 1)])
    assert engine.batch is None
    with pytest.raises(InvalidCall, match="a chunk of 9 tokens"):
        engine.step(1, [driver.sequence(1, PROMPTS[0])], [(1, 9)])
    with pytest.raises(InvalidCall, match="the batch is full"):
        engine.step(1, [driver.sequence(10 + index, PROMPTS[0]) for index in range(9)], [])
    again = Driver(engine)
    again.prefill(again.sequence(0, PROMPTS[0]))
    again.drain()
    assert again.outputs[0] == expected[0]


def test_offline_generation_runs_more_prompts_than_fit_together(engine, expected) -> None:
    outputs = generate(engine, PROMPTS, StoppingParameters(NEW, ignore_eos=True), max_batch_size=2)
    engine.warm_up(max_batch_size=8, max_prefill_tokens=256, max_total_tokens=512)
    assert outputs == expected


def test_a_cache_too_small_for_one_sequence_is_refused() -> None:
    small = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32, cpu_memory=100_000))
    with pytest.raises(NotEnoughMemory, match="lower --max-total-tokens"):
        small.warm_up(max_batch_size=1, max_prefill_tokens=64, max_total_tokens=512)


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        ("absent", ModelNotFound, "no model folder"),
        ("no config", ModelNotFound, "no config.json"),
        ("config", UnsupportedModel, "not valid JSON|cannot be used"),
        ("no weights", ModelNotFound, "no \\*.safetensors"),
        ("truncated", InvalidWeights, "corrupt or incomplete"),
        ("float16 without kernels", UnsupportedModel, "--dtype bfloat16"),
    ],
)
def test_a_folder_that_cannot_be_loaded_says_why(tmp_path, broken, error, message) -> None:
    folder = tmp_path / "model"
    without_kernels = broken == "float16 without kernels"
    if broken != "absent":
        folder.mkdir()
        for file in demo_model.PATH.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    if broken == "no config":
        (folder / "config.json").unlink()
    if broken == "config":
        (folder / "config.json").write_text("{")
    if broken == "no weights":
        (folder / "model.safetensors").unlink()
    if broken == "truncated":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(error, match=message):
        Engine(
            EngineConfig(folder, dtype=torch.float16 if without_kernels else None, custom_kernels=not without_kernels)
        )


def test_memory_is_taken_ahead_of_the_blocks_in_use() -> None:
    engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32))
    assert not engine.reserve(60)
    engine.warm_up(max_batch_size=64, max_prefill_tokens=64, max_total_tokens=2048)
    assert not engine.reserve(60)
    sequence = RunningSequence(1, [1, 2], StoppingParameters(4), blocks=[800])
    engine.step(1, [sequence], [(1, 2)]).collect()
    assert engine.reserve(0)
    assert not engine.reserve(60)
