"""Groups of shards that tests share."""

from collections.abc import Callable, Iterator

import pytest

from tests.unit.engine.ranks import Ranks

RanksOf = Callable[[int], Ranks]


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[RanksOf]:
    """ranks_of(2): two shards, started when they are first asked for."""
    started: dict[int, Ranks] = {}

    def ranks(count: int) -> Ranks:
        if count not in started or started[count].ended:
            started[count] = Ranks(count)
        return started[count]

    yield ranks
    for each in started.values():
        each.__exit__()
