import sys
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from tgi_server.engine.backends.pack import _replace


def test_a_layer_that_is_replaced_is_freed_before_the_next_one_is_made() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    layers = [weakref.ref(layer) for layer in model]
    left: list[int] = []

    def replacement(_: nn.Module) -> nn.Module:
        left.append(sum(layer() is not None for layer in layers))
        return nn.Identity()

    _replace(model, replacement)
    assert left == [3, 2, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_pages_of_a_file_in_which_a_replaced_layer_lies_are_given_back(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1 << 10, 1 << 12)}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        weight = nn.Parameter(file.get_tensor("weight"), requires_grad=False)
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].weight = weight
    used = psutil.Process().memory_info

    def replacement(module: nn.Module) -> nn.Module:
        before = used().shared
        assert module.weight.sum() == weight.numel()
        read.append(used().shared - before)
        return nn.Identity()

    read: list[int] = []
    before = used().shared
    _replace(model, replacement)
    assert read[0] > 15 << 20
    assert used().shared - before < 2 << 20
