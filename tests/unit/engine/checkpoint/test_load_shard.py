"""Engines of several shards: results that agree, and refusals."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import build, make
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.requests import Requests, generate_together, load_engine, prompts
from tgi_server.contract import ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine import CacheCapacity, Engine, EngineConfig, EngineError, RunningSequence
from tgi_server.engine.backends.cpu import CpuModel
from tgi_server.engine.checkpoint.weight_files import weight_files
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.offline import generate
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.speculation.costs import StepCosts

TEXTS = prompts((1, 20, 5, 33))
SAMPLING = SamplingParameters(do_sample=True, temperature=1.3, top_p=0.95, typical_p=0.98, seed=7, watermark=True)
STOPPING = StoppingParameters(16, ignore_eos=True)


def sample(group: ShardGroup | None, folder: Path) -> list[list[int]]:
    return generate(load_engine(folder, group=group), TEXTS, STOPPING, SAMPLING)


@pytest.mark.slow
def test_seeded_samples_are_those_of_the_whole_model(ranks_of: RanksOf, tmp_path: Path) -> None:
    expected = sample(None, make("llama", tmp_path))
    assert len({token for tokens in expected for token in tokens}) > 10
    assert ranks_of(2).run(sample, tmp_path) == [expected, expected]


def drafted(group: ShardGroup | None, folder: Path, draft: Path) -> tuple[list[list[int]], int, int]:
    """Returns replies, and the numbers of drafted and accepted tokens. The second shard drafts other tokens."""
    engine = load_engine(folder, group=group, speculate=3, speculative_model=draft)
    engine.warm_up(max_batch_size=4, max_prefill_tokens=64, max_total_tokens=64)
    assert engine.speculation is not None
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    engine.speculation.drafters[-1]._costs = None  # type: ignore[attr-defined]  # and making, however slow this machine
    if group is not None and group.rank == 1:
        engine.speculation.drafters[-1].propose = lambda room: {each: [3] * room[each] for each in room}  # type: ignore
    driver = Driver(engine)
    outputs = driver.run(*(RunningSequence(i, text, STOPPING, SAMPLING) for i, text in enumerate(TEXTS)))
    return [output.tokens for output in outputs], driver.drafted, driver.accepted


@pytest.mark.slow
def test_all_shards_check_the_drafts_of_the_first(ranks_of: RanksOf, tmp_path: Path) -> None:
    expected = drafted(None, make("llama", tmp_path), tmp_path)
    assert expected[0] == generate(load_engine(tmp_path), TEXTS, STOPPING, SAMPLING)
    assert expected[2] > 0
    assert ranks_of(2).run(drafted, tmp_path, tmp_path) == [expected, expected]


def prompt_logprobs(group: ShardGroup, folder: Path) -> list[float]:
    engine = load_engine(folder, group=group)
    engine.warm_up(max_batch_size=1, max_prefill_tokens=64, max_total_tokens=64)
    report = ReportParameters(prefill_logprobs=True)
    sequence = RunningSequence(0, TEXTS[3], STOPPING, report=report, blocks=[1, 2])
    (generation,) = engine.step(1, [sequence], [(0, len(TEXTS[3]))]).collect().generations
    assert generation.prompt_tokens is not None
    return generation.prompt_tokens.logprobs[1:]


@pytest.mark.slow
def test_every_shard_has_the_same_bits(ranks_of: RanksOf, tmp_path: Path) -> None:
    first, second = ranks_of(2).run(prompt_logprobs, make("llama", tmp_path))
    assert len(first) == len(TEXTS[3]) - 1
    assert not any(map(math.isnan, first))
    assert first == second


def capacity(group: ShardGroup, folder: Path) -> CacheCapacity:
    engine = load_engine(folder, group=group, cpu_memory=(1 + group.rank) << 20)
    return engine.warm_up(max_batch_size=64, max_prefill_tokens=64)


def test_the_shard_with_the_least_memory_decides(ranks_of: RanksOf, tmp_path: Path) -> None:
    first, second = ranks_of(2).run(capacity, make("llama", tmp_path))
    assert first == second
    # Keys and values of one KV head of two, in 2 layers, 16 features each, with half of a megabyte for each shard.
    assert first.max_batch_total_tokens == pytest.approx((1 << 20) / 2 / (2 * 2 * 16 * 4), rel=0.1)


def refusal(group: ShardGroup, folder: Path, settings: dict[str, object]) -> str:
    try:
        load_engine(folder, group=group, **settings)
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        ("mamba", {}, "mamba models cannot be split over several shards; leave out --num-shard and --sharded."),
        ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}, "1 attention heads with 1 KV heads cannot be"),
    ],
)
def test_what_cannot_be_split_says_so(architecture, settings, expected, ranks_of: RanksOf, tmp_path: Path) -> None:
    for reason in ranks_of(2).run(refusal, make(architecture, tmp_path, **settings), {}):
        assert expected in reason


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_slices_that_fit_are_not_enough(name: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    file = make("llama", tmp_path, vocab_size=200) / "model.safetensors"
    save_file({other: tensor[:199] if other == name else tensor for other, tensor in load_file(file).items()}, file)
    expected = f"shapes differ from config.json: {name} is [199, 64], not [200, 64]"
    assert ranks_of(2).run(refusal, tmp_path, {}) == [expected, expected]


def test_a_matrix_that_the_plan_does_not_know_is_named(ranks_of: RanksOf, tmp_path: Path) -> None:
    folder = make("llama", tmp_path)
    for reason in ranks_of(2).run(refuse_unknown_matrix, folder):
        assert "this llama model cannot be split over several shards: its plan does not say" in reason


def refuse_unknown_matrix(group: ShardGroup, folder: Path) -> str:
    from transformers import LlamaForCausalLM

    initialise = LlamaForCausalLM.__init__

    def with_adapter(self: LlamaForCausalLM, config: object) -> None:
        initialise(self, config)
        self.model.layers[0].adapter = torch.nn.Linear(4, 4)

    LlamaForCausalLM.__init__ = with_adapter
    try:
        return refusal(group, folder, {})
    finally:
        LlamaForCausalLM.__init__ = initialise


def refuse_other_dtype(group: ShardGroup, folder: Path) -> str:
    try:
        Engine(EngineConfig(folder, dtype=(torch.float32, torch.bfloat16)[group.rank], group=group))
    except UnsupportedModel as error:
        return str(error)
    return ""


def test_shards_with_different_settings_say_what_differs(ranks_of: RanksOf, tmp_path: Path) -> None:
    first, second = ranks_of(2).run(refuse_other_dtype, make("llama", tmp_path))
    assert first.startswith("shard 0 and shard 1 differ in --dtype (torch.float32 here, torch.bfloat16 there)")
    assert second.startswith("shard 1 and shard 0 differ in --dtype")


def fail_in_a_pass(group: ShardGroup, folder: Path) -> list[str]:
    requests = Requests(load_engine(folder, group=group), TEXTS)
    requests.join(0)
    requests.step()
    ways = {name: getattr(CpuModel, name) for name in ("decode", "forward")}
    for name in ways:
        setattr(CpuModel, name, _fail)
    try:
        return [_error_of(requests.step), _error_of(requests.engine.check_device)]
    finally:
        for name, way in ways.items():
            setattr(CpuModel, name, way)
        group.fault = None


def _fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("Connection closed by peer")


def _error_of(call: Callable[[], None]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


def test_after_an_error_in_a_pass_a_shard_is_good_for_nothing(ranks_of: RanksOf, tmp_path: Path) -> None:
    for rank, (first, then) in enumerate(ranks_of(2).run(fail_in_a_pass, make("llama", tmp_path))):
        assert first == "Connection closed by peer"
        assert then == f"the shards are out of step: RuntimeError in shard {rank}"


@pytest.mark.slow
def test_weights_may_be_quantised(ranks_of: RanksOf, tmp_path: Path) -> None:
    folder = make("opt", tmp_path, hidden_size=128, word_embed_proj_dim=128, ffn_dim=256)
    exact = generate_together(load_engine(folder), TEXTS)
    first, second = ranks_of(2).run(generate_quantised, folder)
    assert first == second
    same = sum(a == b for texts in zip(first, exact, strict=True) for a, b in zip(*texts, strict=True))
    assert same > sum(map(len, exact)) / 4  # of some 200 tokens, chance would have it once


def generate_quantised(group: ShardGroup, folder: Path) -> list[list[int]]:
    return generate_together(load_engine(folder, group=group, quantize="int8"), TEXTS)


@pytest.mark.slow
def test_a_checkpoint_may_be_in_several_files(ranks_of: RanksOf, tmp_path: Path) -> None:
    whole, pieces = make("mixtral", tmp_path / "whole"), tmp_path / "pieces"
    build("mixtral").save_pretrained(pieces, max_shard_size="100KB")
    assert len(weight_files(pieces)) > 1
    assert ranks_of(2).run(sample, pieces) == [sample(None, whole)] * 2
