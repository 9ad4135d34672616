"""Every architecture that can be split, token for token equal to the whole model, in float32."""

from pathlib import Path

import pytest

from tests.tiny_models import ARCHITECTURES, WITH_IMAGES, configuration, make, make_with_images
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.ranks import Ranks
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tests.unit.engine.runners.test_parity import quick
from tgi_server.engine.backends.cpu_model import CpuModel
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.models.families import plan_for
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.parallel.shares import share_of

UNSPLIT = {"codegen", "mamba", "rwkv"}
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


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
def test_two_shards_generate_what_the_whole_model_does(architecture: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    check(ranks_of(2), make(architecture, tmp_path))


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


# Mamba-2 as Bamba and Granite 4 have it: all heads have the same B and C, and one norm; shards have uneven numbers.
ONE_GROUP = {"mamba_n_groups": 1, "mamba_n_heads": 10, "hidden_size": 80}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "count", "settings"),
    [
        ("bamba", 3, ONE_GROUP | {"mamba_proj_bias": True, "num_attention_heads": 5, "num_key_value_heads": 5}),
        ("granitemoehybrid", 2, ONE_GROUP),
        ("falcon_h1", 4, {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
        ("falcon_h1", 4, {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "projectors_bias": True}),
        ("falcon_h1", 2, {"mamba_n_groups": 1, "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3]}),
        ("nemotron_h", 4, {"moe_latent_size": 32, "use_bias": True, "mlp_bias": True}),
        ("lfm2", 2, {"conv_bias": True}),
        ("qwen3_next", 2, {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
        ("jamba", 3, UNEVEN | {"intermediate_size": 96}),
    ],
)
def test_recurrent_layers_of_other_shapes(architecture, count, settings, ranks_of: RanksOf, tmp_path: Path) -> None:
    check(ranks_of(count), make(architecture, tmp_path, **settings))


def test_recurrent_layers_that_cannot_be_split_are_refused_with_the_numbers() -> None:
    plan = plan_for(configuration("qwen3_next", num_key_value_heads=4))
    slice_ = plan.slice("layers.0.linear_attn.A_log")
    assert slice_ is not None
    with pytest.raises(
        UnsupportedModel, match="4 value heads with 2 key heads cannot be split over 3 shards; --num-sh"
    ):
        slice_.ranges(share_of(0, 3, plan.heads), 4)


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
