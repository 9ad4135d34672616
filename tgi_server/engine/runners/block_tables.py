"""The KV blocks of the sequence in each row, as a table on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.memory import to_device


class BlockTables:
    """The block table of all rows.

    table: [rows, blocks] int32. Entries past a row's last block are 0, the scratch block; a row without a sequence has
    only zeros. Additions between two passes go to the device in one copy: read `table` after `flush`.
    """

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        self.table = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self._added: tuple[list[int], list[int]] = ([], [])  # places in the flattened table, and blocks

    def extend(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Sets the row's entries from `first` on to these blocks.

        Raises InvalidCall for more blocks than a sequence may have.
        """
        if first + len(blocks) > self.table.shape[1]:
            raise InvalidCall(f"{first + len(blocks)} blocks for a sequence; at most {self.table.shape[1]} are of use")
        place = row * self.table.shape[1] + first
        self._added[0].extend(range(place, place + len(blocks)))
        self._added[1].extend(blocks)

    def move(self, source: int, target: int) -> None:
        self.flush()
        self.table[target] = self.table[source]

    def clear(self, first: int, last: int) -> None:
        """Empties rows `first` .. `last` - 1."""
        self.flush()
        self.table[first:last].zero_()

    def flush(self) -> Tensor:
        """Copies the additions to the device and returns the table."""
        places, blocks = self._added
        if places:
            added = to_device(places + blocks, torch.int64, self.table.device).view(2, -1)
            self.table.view(-1).index_copy_(0, added[0], added[1].to(torch.int32))
            self._added = ([], [])
        return self.table
