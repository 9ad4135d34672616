"""An engine with random weights, which says anything that a grammar lets it say."""

from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_llama
from tgi_server.engine import Engine, EngineConfig


@pytest.fixture(scope="session")
def random_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(make_llama(tmp_path_factory.mktemp("random")))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Engine:
    engine = Engine(EngineConfig(folder, dtype=dtype, cpu_memory=64 * 2**20))
    engine.warm_up(max_batch_size=16, max_prefill_tokens=256, max_total_tokens=1024)
    return engine
