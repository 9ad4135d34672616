"""An engine with random weights, which says anything that a grammar lets it say."""

from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_llama
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.speculation.costs import StepCosts


@pytest.fixture(scope="session")
def random_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(make_llama(tmp_path_factory.mktemp("random")))


@pytest.fixture(scope="session")
def drafting_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The same, and it drafts whatever it can."""
    engine = load(make_llama(tmp_path_factory.mktemp("drafting")), speculate=6)
    assert engine.speculation is not None
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})
    return engine


def load(folder: Path, dtype: torch.dtype = torch.float32, *, speculate: int = 0) -> Engine:
    engine = Engine(EngineConfig(folder, dtype=dtype, cpu_memory=64 * 2**20, speculate=speculate))
    engine.warm_up(max_batch_size=16, max_prefill_tokens=256, max_total_tokens=1024)
    return engine
