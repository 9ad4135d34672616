"""Messages of shards to each other, through shared memory where that is large enough."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shared.addresses import free_port
from tests.tiny_models import make
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.ranks import Ranks
from tgi_server.engine.errors import PeerLost
from tgi_server.engine.parallel import ShardGroup, fault_of_any, share_cores
from tgi_server.engine.parallel import group as group_module
from tgi_server.engine.parallel.group import peers
from tgi_server.engine.parallel.shared_memory import PLACE_BYTES
from tgi_server.engine.parallel.symmetric_memory import ONE_SHOT_BYTES
from tgi_server.engine.runners.captured_steps import StepCapture

LARGE = PLACE_BYTES // 4 + 3
DTYPES = [torch.float32, torch.bfloat16]


def own(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()).view(shape) % 7 + 10 * rank).to(dtype)


def exchange(group: ShardGroup, shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    tensor = own(group.rank, shape, dtype)
    return [(group.all_reduce(tensor.clone()), group.all_gather(tensor)) for _ in range(5)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (2, 5, 4), (1, LARGE)])
def test_sums_and_collections(shape: tuple[int, ...], dtype: torch.dtype, ranks_of: RanksOf) -> None:
    parts = [own(rank, shape, dtype) for rank in range(2)]
    for results in ranks_of(2).run(exchange, shape, dtype):
        for total, gathered in results:
            assert torch.equal(total, parts[0] + parts[1])
            assert torch.equal(gathered, torch.cat(parts, dim=-1))


def test_every_shard_gets_the_smallest_number_and_all_messages(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(smallest_and_messages) == [(3, ["0", "1"])] * 2


def smallest_and_messages(group: ShardGroup) -> tuple[int, list[str]]:
    return group.minimum(3 + group.rank), group.exchange(str(group.rank))


@pytest.mark.parametrize(
    ("variable", "processes", "threads"),
    [(None, 1, 3), (None, 2, 1), (None, 8, 1), ("4", 1, 4), ("4", 2, 4), ("4", 4, 2)],
)
def test_a_quota_bounds_the_threads_unless_the_user_has_set_them(
    variable: str | None, processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "usable_cores", lambda: 3)
    monkeypatch.setattr(group_module, "cores_of_affinity", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(int(variable or 8))  # as OpenMP begins
        share_cores(processes)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_fault_of_all_is_one_that_they_agree_about(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(agree, "too old") == ["too old 0"] * 2
    assert ranks_of(2).run(agree, "") == [None] * 2


def agree(group: ShardGroup, fault: str) -> str | None:
    return fault_of_any(f"{fault} {group.rank}" if fault else None, group)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [0, 1, 2], ids=["at once", "where the host would wait", "while it is recorded"])
def test_a_shard_that_fails_in_a_recording_does_not_leave_the_others_waiting_for_long(runs: int) -> None:
    with Ranks(2) as ranks, ThreadPoolExecutor(2) as threads:
        started = time.monotonic()
        other, failing = (threads.submit(ranks.run_alone, rank, capture_step, runs) for rank in range(2))
        with pytest.raises(PeerLost, match=r"^shard 1 failed while the others wait for it: no memory is left"):
            failing.result()
        assert not other.done()
        ranks.kill(1)  # as the process ends by itself; on a GPU the launcher then ends the others
        with pytest.raises(PeerLost):
            other.result()
        assert time.monotonic() - started < 45  # most of it to start the processes


@pytest.mark.slow
def test_a_shard_that_fails_in_a_step_ends_and_the_others_learn_of_it(tmp_path: Path) -> None:
    folder = make("llama", tmp_path)
    with Ranks(2) as ranks, ThreadPoolExecutor(2) as threads:
        other, failing = (threads.submit(ranks.run_alone, rank, fail_in_a_step, folder) for rank in range(2))
        error, device = failing.result()
        assert error == "RuntimeError: no memory is left"
        assert device == "the shards are out of step: RuntimeError in shard 1"  # for which the process ends by itself
        assert not other.done()
        ranks.kill(1)
        error, device = other.result()
        assert error.startswith("PeerLost: ")
        assert device == "the shards are out of step: PeerLost in shard 0"


def fail_in_a_step(group: ShardGroup, folder: Path) -> tuple[str, str]:
    """Fails in a sum of shard 1, for which the other waits. Returns the errors of the step, and of the device then."""
    from tests.unit.engine.requests import generate_together, load_engine, prompts

    group.memory = None  # as between machines, and on GPUs
    engine = load_engine(folder, group=group, custom_kernels=False)
    sums, whole, step = iter(range(100)), group.all_reduce, engine.step

    def fails(tensor: Tensor) -> Tensor:
        if next(sums) == 2:
            raise RuntimeError("no memory is left")
        return whole(tensor)

    def started(*arguments: Any, **options: Any) -> Any:
        if group.rank == 1:
            group.all_reduce = fails  # type: ignore[method-assign]
        return step(*arguments, **options)

    engine.step = started  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as failed:
        generate_together(engine, prompts((3, 5)))
    with pytest.raises(RuntimeError) as lost:
        engine.check_device()
    return f"{type(failed.value).__name__}: {failed.value}", str(lost.value)


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda", 1)])
def test_nccl_takes_its_memory_before_the_cache_is_sized(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise connect to the other shards when it first sends tensors of some size."""
    monkeypatch.delenv(group_module.EARLY_CONNECTIONS, raising=False)
    given: dict[str, Any] = {}

    def connected(backend: str, **options: Any) -> None:
        given.update(options, backend=backend, early=os.environ.get(group_module.EARLY_CONNECTIONS))

    monkeypatch.setattr(group_module.dist, "init_process_group", connected)
    group_module.connect(0, 1, "localhost", free_port(), device=device)
    if device.type == "cuda":
        assert (given["backend"], given["device_id"], given["early"]) == ("nccl", device, "0")
    else:
        assert (given["backend"], given["device_id"]) == ("gloo", None)


def capture_step(group: ShardGroup, runs: int) -> None:
    """Fails in shard 1 after some of the runs of a step, while the other captures it."""

    def capture(step: Callable[[], Any]) -> Callable[[], Any]:
        for run in range(3):
            if group.rank == 1 and run == runs:
                raise RuntimeError("no memory is left")
            group.all_reduce(torch.ones(3))
        return step

    group_module.FAULT_SECONDS = 0.5
    StepCapture(cast(Any, None), cast(Any, None), capture, group, {}).decoding([1])


def through_kernels(group: ShardGroup) -> list[Tensor]:
    """Returns a sum and joined tensors, as kernels bring them together that share no memory."""
    memory, group.memory = group.memory, None
    try:
        ranks = group.ranks()
    finally:
        group.memory = memory
    summed = torch.full((2, 3), 1.0 + group.rank).bfloat16()
    with peers():
        ranks.all_reduce(summed)
        return [summed, ranks.all_gather(torch.arange(6.0).view(2, 3) + 10 * group.rank)]


def test_kernels_without_shared_memory_bring_tensors_together_over_the_network(ranks_of: RanksOf) -> None:
    first, second = ranks_of(2).run(through_kernels)
    for summed, joined in (first, second):
        assert torch.equal(summed, torch.full((2, 3), 3.0).bfloat16())
        assert torch.equal(joined, torch.tensor([[0.0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]))


@pytest.mark.slow
def test_kernels_without_shared_memory_miss_a_dead_shard_at_once() -> None:
    with Ranks(2) as ranks:
        ranks.run(through_kernels)
        ranks.kill(1)
        started = time.monotonic()
        with pytest.raises(PeerLost, match="peer lost"):
            ranks.run_alone(0, through_kernels)
        assert time.monotonic() - started < 10


@pytest.mark.parametrize("requested", [True, False])
def test_shards_agree_on_nccl_if_one_gpu_cannot_read_another(requested: bool, ranks_of: RanksOf) -> None:
    for used, fallback in ranks_of(2).run(without_access, requested):
        assert not used
        assert (fallback is not None) is requested
        assert fallback is None or "GPU 1 cannot read the memory of GPU 0" in fallback


def without_access(group: ShardGroup, requested: bool) -> tuple[bool, str | None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: device.index == 0)
        group.share_gpu_memory(torch.device("cuda", group.rank), requested=requested)
        found, group.fallback = group.fallback, None
        return group.symmetric is not None, found


@pytest.mark.parametrize("factor", [1, 2], ids=["right", "wrong"])
def test_small_tensors_of_gpus_are_summed_by_symmetric_memory_if_that_is_right(factor: int, ranks_of: RanksOf) -> None:
    for size, small, large, fallback in ranks_of(2).run(summed_by_symmetric_memory, factor):
        assert size == 2
        assert (small, large) == ((1, 1) if factor == 1 else (0, 0))
        assert (fallback is None) is (factor == 1)
        assert fallback is None or "symmetric memory is off by" in fallback


def summed_by_symmetric_memory(group: ShardGroup, factor: int) -> tuple[float, int, int, str | None]:
    """The operators have the schemas of torch's own, and compute by gloo what they compute on GPUs."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric_module

    symmetric: Any = symmetric_module
    calls = {"one_shot": 0, "two_shot": 0}

    def one_shot(own: Tensor, local: Tensor, operator: str, name: str, out: Tensor) -> Tensor:
        calls["one_shot"] += 1
        own.copy_(local)
        dist.all_reduce(out.copy_(own * factor))
        return out

    def two_shot(own: Tensor, operator: str, name: str) -> Tensor:
        calls["two_shot"] += 1
        dist.all_reduce(own)
        return own

    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("one_shot_all_reduce_copy_out", one_shot)
    library.impl("two_shot_all_reduce_", two_shot)
    kept = symmetric.empty, symmetric.rendezvous, group.memory
    symmetric.empty, symmetric.rendezvous, group.memory = torch.empty, lambda *_: None, None
    try:
        group.share_gpu_memory(torch.device("cpu"))
        calls.update(one_shot=0, two_shot=0)
        small, large = torch.ones(2, 8), torch.ones(ONE_SHOT_BYTES)
        for tensor in (small, large, torch.ones(3)):  # the last is no multiple of 16 bytes
            assert torch.equal(group.all_reduce(tensor), torch.full_like(tensor, 2.0))
        return float(small.amax()), calls["one_shot"], calls["two_shot"], group.fallback
    finally:
        symmetric.empty, symmetric.rendezvous, group.memory = kept
        group.symmetric = group.fallback = None
        library._destroy()
