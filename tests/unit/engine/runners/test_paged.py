"""The memory of the paged path."""

import pytest
import torch

from tgi_server import demo_model
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.errors import NotEnoughMemory


def test_memory_is_taken_ahead_of_the_blocks_in_use() -> None:
    engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32))
    assert not engine.reserve(60)
    engine.warm_up(max_batch_size=64, max_prefill_tokens=64, max_total_tokens=2048)
    assert not engine.reserve(60)
    sequence = RunningSequence(1, [1, 2], StoppingParameters(4), blocks=[800])
    engine.step(1, [sequence], [(1, 2)]).collect()
    assert engine.reserve(0)
    assert not engine.reserve(60)


def test_a_cache_too_small_for_one_sequence_is_refused() -> None:
    small = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32, cpu_memory=100_000))
    with pytest.raises(NotEnoughMemory, match="lower --max-total-tokens"):
        small.warm_up(max_batch_size=1, max_prefill_tokens=64, max_total_tokens=512)


def test_no_more_than_so_many_tokens_of_all_sequences() -> None:
    engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32))
    capacity = engine.warm_up(max_batch_size=64, max_prefill_tokens=64, max_batch_total_tokens=100)
    assert capacity.num_blocks * capacity.block_size == capacity.max_batch_total_tokens
    assert 100 <= capacity.max_batch_total_tokens < 100 + capacity.block_size
    assert capacity.max_total_tokens == capacity.max_batch_total_tokens
