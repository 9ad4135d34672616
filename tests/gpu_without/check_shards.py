"""Two shards on the backend for GPUs: its kernels in the interpreter, steps captured, collectives by gloo."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu_without.check_graphs import Capture
from tests.tiny_models import make
from tests.unit.engine import ranks
from tests.unit.engine.backends.test_cpu import IN_ONE_CALL, OF_THE_SAME_PARTS
from tests.unit.engine.parallel.test_architectures import UNSPLIT
from tests.unit.engine.ranks import Ranks
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tgi_server.engine import runners
from tgi_server.engine.backends import probe
from tgi_server.engine.backends.cuda import CudaBackend
from tgi_server.engine.kernels.triton import split_kv
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.runners import paged, prompt_graphs

TEXTS = prompts((1, 33, 5))
ARCHITECTURES = [name for name in IN_ONE_CALL if name not in OF_THE_SAME_PARTS and name not in UNSPLIT]


@dataclass(frozen=True)
class Found:
    """What one shard has done. collectives: name, shape and dtype of each, in order. replayed: captured steps.

    forward_pass: what the server says of it.
    """

    tokens: list[list[int]]
    collectives: list[tuple[str, tuple[int, ...], torch.dtype]]
    fallbacks: tuple[str, ...]
    replayed: int
    forward_pass: str


def generate(group: ShardGroup | None, folder: Path, kernels: bool = True) -> Found:
    collectives = []

    def noted(name: str, collective: Callable[[ShardGroup, Tensor], Tensor]) -> Any:
        def called(group: ShardGroup, tensor: Tensor) -> Tensor:
            collectives.append((name, tuple(tensor.shape), tensor.dtype))
            return collective(group, tensor)

        return called

    with pytest.MonkeyPatch.context() as patch:
        capture = Capture()
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(prompt_graphs, "TOKEN_COUNTS", (8, 32))
        patch.setattr(split_kv, "multiprocessors", lambda device: 4)
        patch.setattr(probe, "_LONG_RUN", 12)
        patch.setattr(paged, "capture_for", lambda backend: capture if backend.any_lengths else None)
        if kernels:
            patch.setattr(runners, "create_backend", lambda model, config, alone=True: CudaBackend(model, config))
        for name in ("all_reduce", "all_gather"):
            patch.setattr(ShardGroup, name, noted(name, getattr(ShardGroup, name)))
        engine = load_engine(folder, group=group, cuda_graphs=(4,), custom_kernels=kernels)
        tokens = generate_together(engine, TEXTS)
        return Found(tokens, collectives, engine.fallbacks, capture.replayed, engine.info.forward_pass)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "ANSWER_SECONDS", 600)  # the interpreter is slow
        with Ranks(2) as shards:
            yield shards


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_shards_generate_what_the_whole_model_does(architecture: str, two: Ranks, tmp_path: Path) -> None:
    folder = make(architecture, tmp_path)
    whole = generate(None, folder, kernels=False)
    first, second = two.run(generate, folder)
    assert first.tokens == second.tokens == whole.tokens
    assert first.collectives == second.collectives
    assert "all_reduce" in [name for name, *_ in first.collectives]
    assert whole.collectives == []
    assert first.fallbacks == second.fallbacks
    assert first.fallbacks == () or architecture == "llama4_text"  # for whose chunks there is no kernel
    if architecture != "llama4_text":
        assert first.replayed > 0
        assert first.forward_pass == "fused layers, attention by Triton"
