"""Collectives through memory that the shards of one machine share."""

import time

import pytest
import torch
from torch import Tensor

from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.ranks import Ranks
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.parallel.shared_memory import PLACE_BYTES

LARGE = PLACE_BYTES // 4 + 3


def race(group: ShardGroup) -> bool:
    """Many exchanges, with the shards far apart in time now and then."""
    for call in range(2000):
        if call % 100 == 50 * group.rank:
            time.sleep(0.001)
        total = group.all_reduce(torch.full((50,), float(call + group.rank)))
        if not torch.equal(total, torch.full((50,), 2.0 * call + 1)):
            return False
    return True


def test_no_shard_overtakes_another(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(race) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("elements", [3, LARGE])
def test_a_shard_that_has_died_is_missed_at_once(elements: int) -> None:
    with Ranks(2) as ranks:
        ranks.kill(1)
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            ranks.run_alone(0, reduce, elements)
        assert time.monotonic() - started < 10


def reduce(group: ShardGroup, elements: int) -> Tensor:
    return group.all_reduce(torch.ones(elements))
