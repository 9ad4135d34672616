"""Two shards on the backend for GPUs: its kernels in the interpreter, steps captured, collectives by gloo."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu_without.check_graphs import Capture
from tests.tiny_models import make
from tests.unit.engine.backends.test_cpu import IN_ONE_CALL, OF_THE_SAME_PARTS
from tests.unit.engine.parallel.test_architectures import UNSPLIT
from tests.unit.engine.ranks import Ranks
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tgi_server.engine import Engine, Step, runners
from tgi_server.engine.backends import probe
from tgi_server.engine.backends.cuda import CudaBackend
from tgi_server.engine.kernels.triton import split_kv
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.parallel import group as group_module
from tgi_server.engine.runners import paged, prompt_graphs

TEXTS = prompts((1, 33, 5))
ARCHITECTURES = [name for name in IN_ONE_CALL if name not in OF_THE_SAME_PARTS and name not in UNSPLIT]
# Seconds that a family may take: the interpreter is slow.
SECONDS = 600


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


@contextmanager
def captured_steps(kernels: bool = True) -> Iterator[tuple[pytest.MonkeyPatch, Capture]]:
    """Has engines run the backend for GPUs, unless kernels are off, whose steps are captured."""
    with pytest.MonkeyPatch.context() as patch:
        capture = Capture()
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(prompt_graphs, "TOKEN_COUNTS", (20,))
        patch.setattr(split_kv, "multiprocessors", lambda device: 4)
        patch.setattr(probe, "_LONG_RUN", 12)
        patch.setattr(paged, "capture_for", lambda backend: capture if backend.any_lengths else None)
        if kernels:
            patch.setattr(runners, "create_backend", lambda model, config, alone=True: CudaBackend(model, config))
        yield patch, capture


def load_and_run(group: ShardGroup | None, folder: Path, kernels: bool = True) -> tuple[Engine, list[list[int]]]:
    engine = load_engine(folder, group=group, cuda_graphs=(4,), custom_kernels=kernels)
    return engine, generate_together(engine, TEXTS, max_batch_size=4, max_prefill_tokens=32)


def generate(group: ShardGroup | None, folder: Path, kernels: bool = True) -> Found:
    collectives = []

    def noted(name: str, collective: Callable[[ShardGroup, Tensor], Tensor]) -> Any:
        def called(group: ShardGroup, tensor: Tensor) -> Tensor:
            collectives.append((name, tuple(tensor.shape), tensor.dtype))
            return collective(group, tensor)

        return called

    with captured_steps(kernels) as (patch, capture):
        for name in ("all_reduce", "all_gather"):
            patch.setattr(ShardGroup, name, noted(name, getattr(ShardGroup, name)))
        engine, tokens = load_and_run(group, folder, kernels)
        return Found(tokens, collectives, engine.fallbacks, capture.replayed, engine.info.forward_pass)


@pytest.fixture(scope="module")
def two() -> Iterator[Callable[[], Ranks]]:
    """two(): two shards, started when they are first asked for, and after a family that failed."""
    started = []

    def ranks() -> Ranks:
        if not started or started[-1].ended:
            started.append(Ranks(2, answer_seconds=SECONDS, shared_memory=False))
        return started[-1]

    yield ranks
    for each in started[-1:]:
        each.end()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_shards_generate_what_the_whole_model_does(
    architecture: str, two: Callable[[], Ranks], tmp_path: Path
) -> None:
    folder = make(architecture, tmp_path)
    whole = generate(None, folder, kernels=False)
    first, second = two().run(generate, folder)
    assert first.tokens == second.tokens == whole.tokens
    assert first.collectives == second.collectives
    assert "all_reduce" in [name for name, *_ in first.collectives]
    assert whole.collectives == []
    assert first.fallbacks == second.fallbacks
    assert first.fallbacks == () or architecture == "llama4_text"  # for whose chunks there is no kernel
    if architecture != "llama4_text":
        assert first.replayed > 0
        assert first.forward_pass == "fused layers, attention by Triton"


def fail(group: ShardGroup, folder: Path, where: str) -> tuple[str, str | None]:
    """Fails in shard 1: in a sum of a captured step, in the wait for a step's tokens, or in a capture.

    Returns the error, and that of the device then, for which the process ends by itself.
    """
    group_module.FAULT_SECONDS = 1
    if group.rank == 0:
        with captured_steps():
            return _error_of(partial(load_and_run, group, folder)) or "", _error_of(group.check)

    def no_memory(*_: Any) -> Any:
        raise RuntimeError("no memory is left")

    with captured_steps() as (patch, capture):
        if where == "capture":
            patch.setattr(paged, "capture_for", lambda backend: no_memory)
        elif where == "wait":  # an error of the device, which computes nothing from then on
            patch.setattr(Step, "collect", no_memory)
            patch.setattr(group, "check", no_memory)
        else:
            reduce = group.all_reduce
            patch.setattr(group, "all_reduce", lambda tensor: no_memory() if capture.replayed > 2 else reduce(tensor))
        return _error_of(partial(load_and_run, group, folder)) or "", _error_of(group.check)


def _error_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("where", ["step", "wait", "capture"])
def test_a_shard_that_fails_ends_with_the_reason_and_the_other_learns_of_it(where: str, tmp_path: Path) -> None:
    folder = make("llama", tmp_path)
    with Ranks(2, answer_seconds=SECONDS, shared_memory=False) as ranks, ThreadPoolExecutor(2) as threads:
        other, failing = (threads.submit(ranks.run_alone, rank, fail, folder, where) for rank in range(2))
        error, device = failing.result()
        assert "no memory is left" in error
        assert device is not None
        assert not other.done()
        ranks.kill(1)  # as the process ends by itself
        killed = time.monotonic()
        error, _ = other.result()
        assert error.startswith("PeerLost: ")
        assert time.monotonic() - killed < 30
