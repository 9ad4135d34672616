"""Cached prefixes on disk: writes computed prompts, and reads the beginning of a prompt before its request joins."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from tgi_server.router.metrics import Metrics
from tgi_server.router.scheduling.batch import Batch
from tgi_server.router.scheduling.deadlines import Forecast
from tgi_server.router.scheduling.lending import Lending
from tgi_server.router.scheduling.memory import space_of
from tgi_server.router.scheduling.prefix_folder import PrefixFolder
from tgi_server.router.scheduling.prefix_listing import Listing
from tgi_server.router.scheduling.prefix_loader import PrefixLoader
from tgi_server.router.scheduling.prefix_lookup import CachedText, find_stored, stored_adapter
from tgi_server.router.scheduling.prefix_writer import PrefixWriter
from tgi_server.router.scheduling.sequence import Sequence
from tgi_server.router.scheduling.shard_client import ShardedClient

logger = logging.getLogger(__name__)

_EXPIRY_S = 3600.0
_LAST_WRITES_S = 5.0
_LONGEST_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class DiskPrefixes:
    """An opened folder, and the bytes of a KV block and of a state snapshot, summed over all shards."""

    folder: PrefixFolder
    block_bytes: int
    snapshot_bytes: int = 0


class PrefixDisk:
    """The scheduler's interface to the files: looks up prompts, reads files before a request joins, writes new files.

    busy: True while blocks may be lent to the shards, so that requests may have to wait for them.
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
        """Starts a task on the running event loop that deletes expired files.

        next_response: waits until a step has been answered. forecast: estimates the time of a prompt token. work: set
        when a request no longer has to wait, or blocks are free again.
        """
        self._folder = disk.folder
        self._lending = lending = Lending(batch, next_response, work.set)
        self._metrics = metrics.prefixes
        sizes = disk.folder, disk.block_bytes, disk.snapshot_bytes
        self._loader = PrefixLoader(*sizes, shards, lending, forecast, self._metrics)
        self._writer = PrefixWriter(*sizes, shards, lending, self._refresh, self._metrics)
        self._unsure: dict[int, Sequence] = {}  # requests that wait until the changed folder has been listed
        self._refreshing: asyncio.Task[None] | None = None
        self._listing: asyncio.Task[Listing] | None = None  # continues after a time-out
        self._expiring = asyncio.create_task(self._expire())
        self._metrics.held(self._folder.bytes)

    @property
    def busy(self) -> bool:
        return any(task is not None for task in (self._loader.task, self._writer.task, self._refreshing))

    async def stop(self) -> None:
        """Waits a few seconds for the last writes, then cancels all tasks and closes the folder."""
        if self._writer.task is not None:
            await asyncio.wait([self._writer.task], timeout=_LAST_WRITES_S)
        tasks = self._loader.task, self._writer.task, self._refreshing, self._expiring
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._folder.close()

    def look_up(self, sequence: Sequence) -> None:
        """Sets `sequence.on_disk` to the cached tokens in memory and on disk, if the disk continues those in memory."""
        if sequence.reports_prompt:
            return
        if self._folder.changed and not self._folder.writing:  # while this server writes, no other one does
            self._unsure[sequence.id] = sequence
            if self._refreshing is None:
                self._refreshing = asyncio.create_task(self._refresh_for_waiting())
        self._note(sequence)

    def prepare(self, sequence: Sequence) -> bool:
        """Returns True if the sequence may join. Starts to read its files if it has any and none are being read."""
        return sequence.id not in self._unsure and self._loader.prepare(sequence)

    def _note(self, sequence: Sequence) -> None:
        if (stored := find_stored(self._folder, self._lending.memory, sequence)) is not None:
            sequence.on_disk = stored.length
            sequence.likely_cached = max(sequence.likely_cached, sequence.on_disk)

    def computed(self, sequence: Sequence) -> None:
        """Queues the cached blocks of a sequence to be written, unless they are on disk already."""
        request, size = sequence.request, self._lending.memory.block_size
        adapter = stored_adapter(sequence)
        if sequence.settled < size or adapter is None:
            return
        tokens = sequence.beginning(sequence.settled // size * size)
        named = request.keep is not None
        self._writer.add(CachedText(space_of(sequence), adapter, request.cache_namespace, tokens, named))

    async def forget(self, namespace: str) -> int:
        """Deletes the files of a namespace. Returns how many files, counting those of all shards as one."""
        if self._folder.changed:
            with suppress(OSError):
                await self._refresh()
        return await self._writer.forget(namespace)

    async def _refresh_for_waiting(self) -> None:
        """Lists the folder, and looks up the waiting requests again. After a time-out they are computed instead."""
        try:
            async with asyncio.timeout(_LONGEST_REFRESH_S):
                await self._refresh()
            for sequence in self._unsure.values():
                self._note(sequence)
        except OSError as error:  # TimeoutError is one
            reason = str(error) or f"it took more than {_LONGEST_REFRESH_S:g} s"
            logger.warning("the folder with cached prefixes could not be read: %s", reason)
            self._metrics.failed("slow")
        finally:
            self._unsure.clear()
            self._refreshing = None
            self._lending.on_change()

    async def _refresh(self) -> None:
        """Reads the changes that other servers have made in the folder. Raises OSError."""
        folder = self._folder
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(asyncio.to_thread(folder.listing))
        listing = await asyncio.shield(self._listing)
        if damaged := folder.take(listing):
            await asyncio.to_thread(folder.delete, damaged)
        self._metrics.held(folder.bytes)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_S)
            with suppress(OSError):
                await asyncio.to_thread(self._folder.delete, self._folder.expired())
            self._metrics.held(self._folder.bytes)
