"""The engine through its own interface, on the bundled model in float32."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import TOKENIZER_VOCAB_SIZE, make, make_llama
from tgi_server import demo_model
from tgi_server.contract import (
    BlockCopy,
    FinishReason,
    Grammar,
    GrammarKind,
    ReportParameters,
    SamplingParameters,
    StoppingParameters,
    ThoughtBudget,
)
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.driver import BATCH_ID, Driver
from tgi_server.engine.errors import InvalidCall
from tgi_server.grammar import GrammarCompiler

PROMPTS = [[1, 40, 77, 300], [1, *range(50, 90)], [1, 5], [1, *range(400, 480)], [1, 99, 98, 97, 96, 95]]
NEW = 24


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32))
    engine.warm_up(max_batch_size=8, max_prefill_tokens=256, max_total_tokens=512)
    return engine


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Returns what transformers generates for each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)
    outputs = []
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def sequence(
    request_id: int, prompt: list[int], new: int = NEW, *, ignore_eos: bool = True, **options
) -> RunningSequence:
    return RunningSequence(request_id, prompt, StoppingParameters(new, ignore_eos=ignore_eos), **options)


def tokens(driver: Driver) -> dict[int, list[int]]:
    return {request_id: output.tokens for request_id, output in driver.outputs.items()}


def test_sequences_that_join_and_leave_at_different_steps_get_the_tokens_of_transformers(engine, expected) -> None:
    driver = Driver(engine)
    driver.add(sequence(0, PROMPTS[0]))
    driver.step()
    driver.step()
    driver.add(sequence(1, PROMPTS[1]))
    driver.add(sequence(2, PROMPTS[2], new=3))
    driver.step()
    driver.add(sequence(3, PROMPTS[3]))
    driver.step(decode=False)
    for _ in range(4):
        driver.step()
    driver.add(sequence(4, PROMPTS[4]))
    driver.run()
    assert [driver.outputs[index].tokens for index in range(5)] == [*expected[:2], expected[2][:3], *expected[3:]]
    assert {output.finish_reason for output in driver.outputs.values()} == {FinishReason.LENGTH}


def test_a_prompt_in_chunks_beside_a_running_sequence(engine, expected) -> None:
    driver = Driver(engine)
    driver.add(sequence(0, PROMPTS[0]))
    driver.step()
    driver.add(sequence(3, PROMPTS[3]), chunks=(30, 1, 50))
    driver.run()
    assert tokens(driver) == {0: expected[0], 3: expected[3]}


def test_the_next_step_may_start_before_the_last_one_is_collected(engine, expected) -> None:
    driver = Driver(engine)
    driver.add(sequence(0, PROMPTS[0], new=2))
    started = [driver.start()]
    driver.add(sequence(1, PROMPTS[1]))
    started.append(driver.start())
    for _ in range(NEW):
        driver.take(started.pop(0))
        started.append(driver.start())
    for step in started:
        driver.take(step)
    assert tokens(driver) == {0: expected[0][:2], 1: expected[1]}


def test_a_sequence_resumes_where_it_was_interrupted(engine, expected) -> None:
    driver = Driver(engine)
    driver.add(sequence(1, PROMPTS[1]))
    for _ in range(7):
        driver.step()
    driver.leave(1)
    done = driver.outputs[1].tokens
    (rest,) = driver.run(sequence(1, PROMPTS[1], generated_ids=done))
    assert done + rest.tokens == expected[1]


def test_a_prefix_that_is_cached_already_is_not_computed_again(engine, expected) -> None:
    driver = Driver(engine)
    prompt = PROMPTS[3]
    shared, rest = divmod(len(prompt) - 1, engine.info.block_size)
    blocks = list(range(1, shared + 4))
    driver.add(sequence(3, prompt, blocks=blocks))
    driver.step()
    copy = BlockCopy(blocks[shared], 101, rest)
    again = sequence(4, prompt, blocks=[*blocks[:shared], 101, 102, 103], computed=len(prompt) - 1, copy=copy)
    assert rest > 0
    driver.run(again)
    assert tokens(driver) == {3: expected[3], 4: expected[3]}


def test_blocks_granted_as_a_sequence_grows(engine, expected) -> None:
    (output,) = Driver(engine, grow=True).run(grown := sequence(1, PROMPTS[3]))
    assert output.tokens == expected[3]
    assert len(grown.blocks) > -(-len(PROMPTS[3]) // engine.info.block_size)


def test_an_end_of_sequence_token_ends_a_sequence_unless_it_is_ignored(engine) -> None:
    eos = engine.info.eos_token_ids[0]
    # A bias that no logit overcomes makes the token certain.
    sampling = SamplingParameters(logit_bias={eos: 1000.0})
    ended, ignored = Driver(engine).run(
        sequence(0, PROMPTS[0], sampling=sampling, ignore_eos=False), sequence(1, PROMPTS[0], new=3, sampling=sampling)
    )
    assert (ended.tokens, ended.finish_reason) == ([eos], FinishReason.EOS_TOKEN)
    assert (ignored.tokens, ignored.finish_reason) == ([eos] * 3, FinishReason.LENGTH)


def test_end_of_sequence_tokens_that_the_vocabulary_does_not_have_are_left_out(tmp_path) -> None:
    folder = make_llama(tmp_path)
    settings = json.loads((folder / "generation_config.json").read_text())
    unknown = [-1, TOKENIZER_VOCAB_SIZE]
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [*unknown, 2]}))
    engine = Engine(EngineConfig(folder))
    engine.warm_up(max_batch_size=2, max_prefill_tokens=64, max_total_tokens=64)
    late = SamplingParameters(min_tokens=3, late_tokens=engine.info.eos_token_ids)
    engine.grammars.check(grammar := Grammar(GrammarKind.REGEX, "a*"))
    first, second = Driver(engine).run(
        sequence(0, [1, 5], new=3, sampling=late), sequence(1, [1, 5], new=3, grammar=grammar)
    )
    assert engine.info.eos_token_ids == (2,)
    assert len(first.tokens) == len(second.tokens) == 3
    assert {engine.grammars.tokenizer.decode([token]) for token in second.tokens} == {"a"}


def test_the_same_seed_gives_the_same_tokens_whatever_else_runs(engine) -> None:
    sampling = SamplingParameters(do_sample=True, temperature=1.5, seed=7)
    (alone,) = Driver(engine).run(sequence(0, PROMPTS[0], sampling=sampling))
    driver = Driver(engine)
    driver.add(sequence(1, PROMPTS[1]))
    among = driver.add(sequence(0, PROMPTS[0], sampling=sampling))
    driver.step()
    driver.run(sequence(2, PROMPTS[2], sampling=SamplingParameters(do_sample=True, seed=8)))
    assert among.tokens == alone.tokens


def test_logprobs_of_prompt_and_tokens_are_those_of_the_model(engine) -> None:
    driver = Driver(engine)
    report = ReportParameters(logprobs=True, top_n_tokens=3, prefill_logprobs=True)
    prompt = PROMPTS[1]
    half = len(prompt) // 2
    driver.add(sequence(0, prompt, new=2, report=report), chunks=(half, len(prompt) - half))
    assert driver.step() == []
    [generation] = driver.step()
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
            driver.add(sequence(index, prompt, **options[index]))
            driver.step()
        driver.run()
        outputs[name] = tokens(driver)
    assert outputs["greedy"] == outputs["reported"]
    assert outputs["mixed"].pop(1) != outputs["greedy"].pop(1)
    assert outputs["mixed"] == outputs["greedy"]


def test_calls_that_contradict_the_batch_are_refused_and_the_engine_goes_on(engine, expected) -> None:
    driver = Driver(engine)
    driver.add(sequence(0, PROMPTS[0]))
    driver.step()
    with pytest.raises(InvalidCall, match="no prompt left"):
        engine.step(BATCH_ID, chunks=[(0, 1)])
    assert engine.batch is None
    with pytest.raises(InvalidCall, match="a chunk of 9 tokens"):
        engine.step(BATCH_ID, [sequence(1, PROMPTS[0], blocks=[1])], [(1, 9)])
    with pytest.raises(InvalidCall, match="the batch is full"):
        engine.step(BATCH_ID, [sequence(10 + index, PROMPTS[0]) for index in range(9)])
    with pytest.raises(InvalidCall, match="block 100000 does not exist; blocks go from 1 to"):
        engine.step(BATCH_ID, [sequence(1, PROMPTS[0], blocks=[1, 100_000])])
    (again,) = Driver(engine).run(sequence(0, PROMPTS[0]))
    assert again.tokens == expected[0]


@pytest.mark.parametrize("architecture", ["gptj", "opt"])
def test_no_sequence_may_be_longer_than_a_table_of_positions(architecture, tmp_path) -> None:
    engine = Engine(EngineConfig(make(architecture, tmp_path / "model", max_position_embeddings=64)))
    capacity = engine.warm_up(max_batch_size=1, max_prefill_tokens=64, max_total_tokens=100)
    assert capacity.max_total_tokens == 64
    (output,) = Driver(engine).run(sequence(0, [5] * 60, new=4))
    assert len(output.tokens) == 4


def test_rotary_positions_go_on_beyond_those_of_the_configuration(tmp_path) -> None:
    engine = Engine(EngineConfig(make("llama", tmp_path / "model", max_position_embeddings=64)))
    capacity = engine.warm_up(max_batch_size=1, max_prefill_tokens=128, max_total_tokens=100)
    assert capacity.max_total_tokens == 100
    (output,) = Driver(engine).run(sequence(0, [5] * 90, new=10))
    assert len(output.tokens) == 10


def test_before_the_warm_up_there_is_no_step() -> None:
    engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32))
    with pytest.raises(InvalidCall, match="warm up before the first step"):
        engine.step(BATCH_ID, [sequence(0, [1])])


def test_a_tokenizer_that_cannot_be_used_fails_budgets_of_thoughts_alone_and_is_read_once(
    engine, tmp_path, monkeypatch
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    monkeypatch.setattr(engine, "grammars", GrammarCompiler(tmp_path, TOKENIZER_VOCAB_SIZE, [1]))
    driver = Driver(engine)
    for first in (0, 2):
        budget = ThoughtBudget(1, "<think>", "</think>", (5,))
        driver.add(sequence(first, PROMPTS[0], new=2, thought_budget=budget))
        driver.add(sequence(first + 1, PROMPTS[1], new=2))
        driver.run()
        assert "tokenizer cannot be read" in driver.outputs[first].error
        assert len(driver.outputs[first + 1].tokens) == 2
        file.unlink(missing_ok=True)
