"""Requests with adapters, beside drafters of every kind, some of which share layers with the model."""

from pathlib import Path

import pytest

from tests.tiny_models import make
from tests.unit.engine.lora.adapted import make_adapted
from tests.unit.engine.requests import Requests, load_engine, prompts
from tests.unit.engine.runners.test_parity import check, run_overlapping
from tests.unit.engine.speculation.test_eagle import random_network, save_network
from tests.unit.engine.speculation.test_medusa import plain_blocks, save_heads
from tgi_server.engine.speculation.costs import StepCosts


@pytest.mark.slow
@pytest.mark.parametrize("custom_kernels", [True, False])
@pytest.mark.parametrize("kind", ["n-gram", "draft model", "medusa", "eagle"])
def test_tokens_are_those_of_the_merged_models(kind: str, custom_kernels: bool, tmp_path: Path) -> None:
    model = make_adapted(make("llama", tmp_path / "model", num_hidden_layers=4))
    folder = _drafter(kind, model.folder, tmp_path / "drafter")
    engine = load_engine(model.folder, speculate=3, speculative_model=folder, custom_kernels=custom_kernels)
    model.load(engine)
    requests = Requests(engine, prompts(), adapters=model.ids())
    assert engine.speculation is not None
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    run_overlapping(requests)
    check(requests, model.expected())


def _drafter(kind: str, model: Path, folder: Path) -> Path | None:
    if kind == "medusa":
        return save_heads(folder, plain_blocks())
    if kind == "eagle":
        return save_network(folder, {name: each for name, each in random_network().items() if name != "lm_head.weight"})
    return model if kind == "draft model" else None
