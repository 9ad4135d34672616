"""The memory of the paged path."""

from pathlib import Path

import pytest
import torch

from tests.timing import until
from tests.tiny_models import make
from tests.unit.engine.own_memory import resident
from tests.unit.engine.probed import probed
from tgi_server import demo_model
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.plain import PlainBackend
from tgi_server.engine.backends.probe import LogitsProbe
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.errors import NotEnoughMemory
from tgi_server.engine.runners import paged


def test_memory_is_taken_ahead_of_the_blocks_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_RESERVED_TOKENS", 2048)
    engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32))
    engine.warm_up(max_batch_size=64, max_prefill_tokens=64, max_total_tokens=2048)
    backend = engine._runner.model.attention  # type: ignore[attr-defined]
    keys = backend.keys[-1]
    ahead, piece = 2048 // backend.block_size * keys[0].nbytes, 2 << 20
    until(lambda: ahead <= resident(keys))  # what a busy machine does not take in time, a thread takes
    assert resident(keys) < ahead + 2 * piece
    block = 4 * 2048 // backend.block_size
    sequence = RunningSequence(1, [1, 2], StoppingParameters(4), blocks=[block])
    engine.step(1, [sequence], [(1, 2)]).collect()
    until(lambda: resident(keys) >= (block + 1) * keys[0].nbytes + ahead)


class Failing(GatherAttention):
    """Computes what it should, but not for the long prompts that the probe at load has none of."""

    block_size = 32

    def attend(self, layer, query, metadata, variant) -> torch.Tensor:
        if len(query) > 310:
            raise TypeError("the kernel wants more shared memory than there is")
        return super().attend(layer, query, metadata, variant)


def test_a_kernel_that_fails_while_warming_up_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paged, "warm_up_tokens", lambda config, tokens, fixed_memory: tokens)
    config = EngineConfig(make("llama", tmp_path, max_position_embeddings=512), cpu_memory=1 << 24)
    model = load_model(config, torch.device("cpu"))
    with torch.inference_mode():
        paged_model, _ = probed(model)
        probe = LogitsProbe(paged_model, long=True)
        paged_model.attention = Failing(paged_model.kv_shape, model.device, model.dtype)
        assert probe.fault(paged_model, "Failing") is None
        runner = paged.PagedRunner(paged_model, PlainBackend(model, config))
        capacity = runner.warm_up(4, 400, 500, 500)
    assert (capacity.block_size, capacity.max_total_tokens) == (32, 500)
    (fallback,) = runner.fallbacks
    assert fallback.startswith("attention runs in plain torch, which is slow: Failing fails (TypeError: the kernel")
    assert fallback in caplog.messages


class Wrong(GatherAttention):
    """Attends wrongly to whatever stands in a second chunk of a prompt."""

    def attend(self, layer, query, metadata, variant) -> torch.Tensor:
        output = super().attend(layer, query, metadata, variant)
        for chunk in metadata.chunks:
            if chunk.kv_length > chunk.length:
                output[chunk.start : chunk.start + chunk.length] = 0
        return output


def test_the_probe_of_a_backend_continues_prompts(tmp_path: Path) -> None:
    model = load_model(EngineConfig(make("llama", tmp_path)), torch.device("cpu"))
    with torch.inference_mode():
        paged_model, _ = probed(model)
        probe = LogitsProbe(paged_model, long=True)
        paged_model.attention = Wrong(paged_model.kv_shape, model.device, model.dtype)
        fault = probe.fault(paged_model, "Wrong")
    assert fault is not None
    assert fault.startswith("the model with Wrong is off by")


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
