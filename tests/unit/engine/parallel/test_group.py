"""Messages of shards to each other, through shared memory where that is large enough."""

import pytest
import torch
from torch import Tensor

from tests.unit.engine.conftest import RanksOf
from tgi_server.engine.parallel import ShardGroup, share_cores
from tgi_server.engine.parallel import group as group_module
from tgi_server.engine.parallel.shared_memory import PLACE_BYTES

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
