"""Every architecture that can be split, token for token equal to the whole model, in float32."""

from pathlib import Path

import pytest

from tests.tiny_models import ARCHITECTURES, HYBRIDS, WITH_IMAGES, make, make_with_images
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.ranks import Ranks
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tests.unit.engine.runners.test_parity import quick
from tgi_server.engine.backends.cpu_model import CpuModel
from tgi_server.engine.parallel import ShardGroup

UNSPLIT = HYBRIDS | {"mamba", "rwkv"}
TEXTS = prompts((1, 70, 5, 33, 2, 17))
# Two shards get one and two KV heads, with two and four heads of queries.
UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 101}


def generate(group: ShardGroup, folder: Path, settings: dict[str, object]) -> tuple[list[list[int]], bool]:
    engine = load_engine(folder, group=group, **settings)
    return generate_together(engine, TEXTS), engine.info.paged


def generate_over_a_network(group: ShardGroup, folder: Path) -> list[list[int]]:
    """As shards on several machines do, which share no memory."""
    memory, group.memory = group.memory, None
    try:
        engine = load_engine(folder, group=group)
        assert isinstance(engine._runner.model, CpuModel)  # type: ignore[attr-defined]
        return generate_together(engine, TEXTS)
    finally:
        group.memory = memory


def check(ranks: Ranks, folder: Path, **settings: object) -> None:
    whole = load_engine(folder, **settings)
    expected = generate_together(whole, TEXTS)
    assert len({token for tokens in expected for token in tokens}) > 10, "a model that says nothing proves nothing"
    for outputs, paged in ranks.run(generate, folder, settings):
        assert outputs == expected
        assert paged is whole.info.paged


def test_two_shards_generate_what_the_whole_model_does(ranks_of: RanksOf, tmp_path: Path) -> None:
    check(ranks_of(2), make("llama", tmp_path))


@pytest.mark.parametrize("architecture", ["llama", "olmo2"])
def test_shards_without_shared_memory_are_one_kernel_call_as_well(
    architecture: str, ranks_of: RanksOf, tmp_path: Path
) -> None:
    folder = make(architecture, tmp_path)
    expected = generate_together(load_engine(folder), TEXTS)
    assert ranks_of(2).run(generate_over_a_network, folder) == [expected, expected]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - UNSPLIT))
def test_shards_of_every_architecture_generate_what_the_whole_model_does(
    architecture: str, count: int, ranks_of: RanksOf, tmp_path: Path
) -> None:
    check(ranks_of(count), make(architecture, tmp_path))


@pytest.mark.parametrize("model_type", quick(sorted(set(WITH_IMAGES) - UNSPLIT), {"mistral3"}))
def test_shards_of_models_that_read_images_too(model_type: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    check(ranks_of(2), make_with_images(model_type, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["bloom", "gpt_bigcode_multi_head", "llama", "opt", "t5"])
def test_shards_without_the_engines_kernels_generate_what_the_whole_model_does(
    architecture: str, ranks_of: RanksOf, tmp_path: Path
) -> None:
    check(ranks_of(2), make(architecture, tmp_path), custom_kernels=False)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "opt", "gpt_neox", "t5"])
def test_three_shards_with_different_numbers_of_heads_generate_what_the_whole_model_does(
    architecture: str, ranks_of: RanksOf, tmp_path: Path
) -> None:
    check(ranks_of(3), make(architecture, tmp_path))


def test_kv_heads_need_not_divide(ranks_of: RanksOf, tmp_path: Path) -> None:
    check(ranks_of(2), make("llama", tmp_path, **UNEVEN))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("gpt2", {"tie_word_embeddings": False}),
        ("gptj", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("falcon_40b", {"bias": True}),
        ("t5", {"tie_word_embeddings": False}),
    ],
)
def test_tied_weights_and_biases(architecture, settings, ranks_of: RanksOf, tmp_path: Path) -> None:
    check(ranks_of(2), make(architecture, tmp_path, **settings))
