"""Cached prefixes on disk: written when a request has ended, read before one joins that begins with them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from tgi_server.router.metrics import Metrics
from tgi_server.router.scheduling.batch import Batch
from tgi_server.router.scheduling.deadlines import Forecast
from tgi_server.router.scheduling.lending import Lending
from tgi_server.router.scheduling.memory import Memory, space_of
from tgi_server.router.scheduling.prefix_folder import PrefixFolder
from tgi_server.router.scheduling.prefix_loader import PrefixLoader
from tgi_server.router.scheduling.prefix_lookup import CachedText, find_stored
from tgi_server.router.scheduling.prefix_writer import PrefixWriter
from tgi_server.router.scheduling.sequence import Sequence
from tgi_server.router.scheduling.shard_client import ShardedClient

_EXPIRY_S = 3600.0
_LAST_WRITES_S = 5.0


@dataclass(frozen=True, slots=True)
class DiskPrefixes:
    """A folder that was opened, and the bytes of a block, and of a snapshot of states, in all shards together."""

    folder: PrefixFolder
    block_bytes: int
    snapshot_bytes: int = 0


class PrefixDisk:
    """The scheduler's view of the files: looks up, reads before a request joins, and writes what is computed.

    busy: blocks are lent, so that others may lack them.
    """

    def __init__(
        self,
        disk: DiskPrefixes,
        shards: ShardedClient,
        batch: Batch,
        next_response: Callable[[], Awaitable[None]],
        forecast: Forecast,
        metrics: Metrics,
        work: asyncio.Event,
    ) -> None:
        """Begins to delete files that are not used, on the running event loop.

        next_response: returns when a step has been answered. forecast: says what a prompt token takes to compute.
        work: set when a request need not wait any more, or blocks are free again.
        """
        self._folder = disk.folder
        self._lending = lending = Lending(batch, next_response, work.set)
        self._metrics = metrics.prefixes
        sizes = disk.folder, disk.block_bytes, disk.snapshot_bytes
        self._loader = PrefixLoader(*sizes, shards, lending, forecast, self._metrics)
        self._writer = PrefixWriter(*sizes, shards, lending, self._metrics)
        self.prepare = self._loader.prepare
        self._expiring = asyncio.create_task(self._expire())
        self._metrics.held(self._folder.bytes)

    @property
    def busy(self) -> bool:
        return self._loader.task is not None or self._writer.task is not None

    async def stop(self) -> None:
        """Waits a moment for what is to be written."""
        if self._writer.task is not None:
            await asyncio.wait([self._writer.task], timeout=_LAST_WRITES_S)
        for task in (self._loader.task, self._writer.task, self._expiring):
            if task is not None:
                task.cancel()

    def look_up(self, sequence: Sequence) -> None:
        """Notes how many of the sequence's known tokens disk and memory have, if the disk has some more of them."""
        if sequence.reports_prompt:
            return
        if (stored := find_stored(self._folder, self._lending.memory, sequence)) is not None:
            sequence.on_disk = stored.length
            sequence.likely_cached = max(sequence.likely_cached, sequence.on_disk)

    def computed(self, sequence: Sequence) -> None:
        """Has what the cache has of a sequence written, unless the disk has it."""
        request, size = sequence.request, self._lending.memory.block_size
        if sequence.settled < size or sequence.adapter is not None:
            return
        tokens = sequence.beginning(sequence.settled // size * size)
        named = request.keep is not None
        self._writer.add(CachedText(space_of(sequence), request.cache_namespace, tokens, named))

    async def forget(self, namespace: str) -> int:
        """Deletes the files of a namespace. Returns how many texts, or parts of a text, they were."""
        return await self._writer.forget(namespace)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_S)
            with suppress(OSError):
                await asyncio.to_thread(self._folder.delete, self._folder.expired())
            self._metrics.held(self._folder.bytes)


async def forget(memory: Memory, disk: PrefixDisk | None, namespace: str) -> int:
    """Forgets what is cached under a namespace. Returns how many files were deleted."""
    memory.forget(namespace)
    return 0 if disk is None else await disk.forget(namespace)
