import math

import pytest
import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.kv_scales import KVScales, read_kv_scales
from tgi_server.engine.errors import InvalidWeights

LAYER = "model.layers.3.self_attn"


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({f"{LAYER}.k_scale": 0.5, f"{LAYER}.v_scale": 0.25}, KVScales(0.5, 0.25)),
        ({f"{LAYER}.k_proj.k_scale": 0.5, f"{LAYER}.v_proj.v_scale": 0.25}, KVScales(0.5, 0.25)),
        ({f"{LAYER}.k_proj.output_scale": 0.5, f"{LAYER}.v_proj.output_scale": 0.25}, KVScales(0.5, 0.25)),
        ({f"{LAYER}.kv_scale": 0.5}, KVScales(0.5, 0.5)),
        ({f"{LAYER}.v_scale": 0.25}, KVScales(1.0, 0.25)),
    ],
)
def test_scales_by_all_names_that_they_have(tensors: dict[str, float], expected: KVScales) -> None:
    others = {"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2), f"{LAYER}.q_proj.weight_scale": torch.ones(1)}
    found = {name: torch.tensor(scale, dtype=torch.bfloat16) for name, scale in tensors.items()}
    assert read_kv_scales(others | found) == {3: expected}


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        (f"{LAYER}.k_scale", torch.ones(8, 1), r"self_attn.k_scale has the shape \[8, 1\]; .* one scale for all heads"),
        (f"{LAYER}.v_scale", torch.tensor([-1.0]), "self_attn.v_scale is -1.0; a scale is a positive number"),
        (f"{LAYER}.k_scale", torch.tensor(math.nan), "self_attn.k_scale is nan"),
        ("model.k_scale", torch.tensor(1.0), "model.k_scale does not name its layer"),
    ],
)
def test_what_is_no_scale_of_a_layer_is_refused_by_name(name: str, tensor: Tensor, reason: str) -> None:
    with pytest.raises(InvalidWeights, match=reason):
        read_kv_scales({name: tensor})
