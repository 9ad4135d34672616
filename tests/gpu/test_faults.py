"""Memory that runs out in a step, and a device that computes no more."""

import subprocess
import sys

import pytest
import torch

from tests.gpu.marks import NEEDS_GPU
from tests.tiny_models import make
from tests.unit.engine.requests import load_engine, prompts
from tgi_server.contract import ReportParameters, StoppingParameters
from tgi_server.engine import RunningSequence

pytestmark = NEEDS_GPU

POISONED = """
import torch
from pathlib import Path
from tgi_server.engine import Engine, EngineConfig

engine = Engine(EngineConfig(Path({folder!r}), dtype=torch.float32))
engine.warm_up(2, 16, 32)
engine.check_device()
try:
    torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")].sum().item()
except RuntimeError:
    try:
        engine.check_device()
    except RuntimeError:
        print("lost")
"""


@pytest.mark.whole_gpu
def test_a_step_that_memory_does_not_suffice_for_leaves_the_engine_working(tmp_path) -> None:
    engine = load_engine(make("llama", tmp_path, vocab_size=200_000, max_position_embeddings=4096))
    engine.warm_up(max_batch_size=2, max_prefill_tokens=64, max_total_tokens=4096)
    (text,) = prompts((4000,))
    blocks = list(range(1, 2 + 4000 // engine.info.block_size))
    stopping, report = StoppingParameters(2, ignore_eos=True), ReportParameters(prefill_logprobs=True)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    filling = torch.empty(max(0, free - (1 << 30)), dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        engine.step(1, [RunningSequence(1, text, stopping, report=report, blocks=blocks)], [(1, 4000)]).collect()
    assert engine.batch is None
    del filling
    torch.cuda.empty_cache()
    engine.step(1, [RunningSequence(2, text[:50], stopping, blocks=blocks)], [(2, 50)]).collect()
    assert len(engine.step(1).collect().generations) == 1


def test_a_poisoned_device_is_noticed(tmp_path) -> None:
    script = POISONED.format(folder=str(make("llama", tmp_path)))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout.strip() == "lost", result.stderr[-2000:]
