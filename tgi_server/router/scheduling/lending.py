"""Lends KV blocks and snapshots of states to the shards, which write them into files or read files into them.

The shards do this while they compute the steps of other requests, so nothing else may use what is lent. They begin only
when all steps that were sent before have been answered, because these may still write into blocks that were granted to
other sequences.
"""

from collections.abc import Awaitable, Callable, Iterable

from tgi_server.router.scheduling.batch import Batch
from tgi_server.router.scheduling.memory import PagedMemory


class Lending:
    """Lends parts of the memory of a batch, and takes them back.

    on_change: to be called when blocks are free again.
    """

    def __init__(
        self, batch: Batch, next_response: Callable[[], Awaitable[None]], on_change: Callable[[], None]
    ) -> None:
        """next_response: returns when a step has been answered."""
        assert isinstance(batch.memory, PagedMemory)
        self.memory = batch.memory
        self.on_change = on_change
        self._batch = batch
        self._next_response = next_response

    @property
    def batch_id(self) -> int:
        """The id of the running batch; with another one, the shards have forgotten all that was cached."""
        return self._batch.id

    def lend(self, blocks: Iterable[int], snapshot: int = 0) -> None:
        """Keeps cached blocks, and a snapshot unless that is 0, as they are until they are given back."""
        self.memory.lend(blocks)
        if snapshot and self.memory.snapshots is not None:
            self.memory.snapshots.lend(snapshot)

    def lend_free(self, number: int, *, with_snapshot: bool, known: int, cached: int) -> tuple[list[int], int] | None:
        """Returns blocks, and a snapshot or 0, to read into; None if that leaves no room for their sequence.

        known: the tokens of that. cached: its blocks that are in memory.
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
        """Waits until all steps that were sent are answered. Returns False if the shards have forgotten the batch."""
        batch, sent = self._batch, self._batch.step - 1
        while batch.id == batch_id and batch.answered < sent:
            await self._next_response()
        return batch.id == batch_id
