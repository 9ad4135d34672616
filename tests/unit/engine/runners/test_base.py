import pytest
import torch

from tests.tiny_models import build
from tgi_server.engine.models.families import position_limit
from tgi_server.engine.runners.base import warm_up_tokens

UNBOUNDED = {"bloom", "bloom_6_heads", "falcon_rw", "flan_t5", "mpt", "mpt_6_heads", "t5"}


@pytest.mark.parametrize(
    "architecture", ["falcon_7b", "galactica", "gpt2", "gptj", "llama", "starcoder", *sorted(UNBOUNDED)]
)
def test_a_model_has_as_many_positions_as_it_can_compute(architecture) -> None:
    assert position_limit(build(architecture).config) == (None if architecture in UNBOUNDED else 256)


def test_scaled_rotary_positions_reach_as_far_as_their_factor_says() -> None:
    config = build("llama").config
    config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert position_limit(config) == 512
    config.rope_parameters = {"rope_type": "llama3", "factor": 1.5, "original_max_position_embeddings": 128}
    assert position_limit(config) == 256


def test_every_learned_position_can_be_used() -> None:
    for architecture in ("opt", "gpt2", "starcoder"):
        model = build(architecture, max_position_embeddings=16)
        limit = position_limit(model.config)
        assert limit == 16
        model(input_ids=torch.zeros(1, limit, dtype=torch.int64))
        with pytest.raises(IndexError):
            model(input_ids=torch.zeros(1, limit + 1, dtype=torch.int64))


def test_the_warm_up_leaves_room_for_a_token_more() -> None:
    config = build("gpt2").config
    assert warm_up_tokens(config, 4096, fixed_memory=True) == 255
    assert warm_up_tokens(config, 100, fixed_memory=True) == 100
    assert warm_up_tokens(config, 4096, fixed_memory=False) == 32
    assert warm_up_tokens(build("bloom").config, 4096, fixed_memory=True) == 4096
