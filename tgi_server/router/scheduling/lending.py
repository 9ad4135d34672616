"""Lends KV blocks and state snapshots to the shards, which write them to files or read files into them.

The shards do this while they compute steps, so no sequence may use lent blocks meanwhile. They begin only when all
steps that were sent before have been answered: these may still write to the blocks for their former sequences.
"""

from collections.abc import Awaitable, Callable, Iterable

from tgi_server.router.scheduling.batch import Batch
from tgi_server.router.scheduling.memory import PagedMemory


class Lending:
    """Lends blocks and snapshots of a batch's memory, and takes them back.

    on_change: for the borrower to call when blocks are free again.
    """

    def __init__(
        self, batch: Batch, next_response: Callable[[], Awaitable[None]], on_change: Callable[[], None]
    ) -> None:
        """next_response: waits until a step has been answered."""
        assert isinstance(batch.memory, PagedMemory)
        self.memory = batch.memory
        self.on_change = on_change
        self._batch = batch
        self._next_response = next_response

    @property
    def batch_id(self) -> int:
        """The id of the running batch. A new id means that the shards have lost all cached prefixes."""
        return self._batch.id

    def lend(self, blocks: Iterable[int], snapshot: int = 0) -> None:
        """Protects cached blocks from changes until `give_back`, and so a snapshot unless that is 0."""
        self.memory.lend(blocks)
        if snapshot and self.memory.snapshots is not None:
            self.memory.snapshots.lend(snapshot)

    def lend_free(self, number: int, *, with_snapshot: bool, known: int, cached: int) -> tuple[list[int], int] | None:
        """Returns free blocks to read into, and a snapshot or 0; None if that would leave no room for their sequence.

        number: how many blocks. known: number of known tokens of the sequence. cached: number of its blocks in memory.
        """
        memory = self.memory
        spare = -(-known // memory.block_size) - cached - number + len(self._batch)
        blocks = memory.lend_free(number, spare)
        snapshot = memory.snapshots.lend_free() if with_snapshot and memory.snapshots is not None else 0
        if len(blocks) == number and bool(snapshot) == with_snapshot:
            return blocks, snapshot
        self.give_back(blocks, snapshot)
        return None

    def give_back(self, blocks: Iterable[int], snapshot: int = 0) -> None:
        """Ends what `lend` or `lend_free` began."""
        self.memory.give_back(blocks)
        if snapshot and self.memory.snapshots is not None:
            self.memory.snapshots.give_back(snapshot)

    async def settled(self, batch_id: int) -> bool:
        """Waits until all steps sent so far are answered. Returns False if the shards have lost the batch meanwhile."""
        batch, sent = self._batch, self._batch.step - 1
        while batch.id == batch_id and batch.answered < sent:
            await self._next_response()
        return batch.id == batch_id
