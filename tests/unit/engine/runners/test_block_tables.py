import pytest
import torch

from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.runners.block_tables import BlockTables


@pytest.fixture
def tables() -> BlockTables:
    tables = BlockTables(rows=4, blocks=3, device=torch.device("cpu"))
    tables.extend(0, 0, [5])
    tables.extend(1, 0, [6, 7])
    return tables


def test_blocks_are_there_after_a_flush(tables) -> None:
    tables.extend(0, 1, [8, 9])
    assert tables.flush().tolist() == [[5, 8, 9], [6, 7, 0], [0, 0, 0], [0, 0, 0]]
    tables.extend(2, 0, [4])
    assert tables.flush()[2].tolist() == [4, 0, 0]


def test_what_moves_or_goes_takes_along_what_was_not_flushed(tables) -> None:
    tables.move(source=1, target=0)
    tables.clear(1, 4)
    assert tables.flush().tolist() == [[6, 7, 0]] + [[0, 0, 0]] * 3


def test_blocks_never_reach_into_the_next_row(tables) -> None:
    with pytest.raises(InvalidCall, match="4 blocks for a sequence; at most 3 are of use"):
        tables.extend(0, 1, [1, 2, 3])
    assert tables.flush()[1].tolist() == [6, 7, 0]
