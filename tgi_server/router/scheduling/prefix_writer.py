"""Writes cached blocks and snapshots into files."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from shared.stubs import generate_pb2 as pb
from tgi_server.prefix_files import MOST_ENTRIES
from tgi_server.router.errors import InvalidRequest, RouterError
from tgi_server.router.metrics import PrefixDiskMetrics
from tgi_server.router.scheduling.lending import Lending
from tgi_server.router.scheduling.prefix_folder import PrefixFolder, StoredFile
from tgi_server.router.scheduling.prefix_lookup import WIDTH, CachedText
from tgi_server.router.scheduling.shard_client import ShardedClient

logger = logging.getLogger(__name__)

# A text without a name is written when this many of its tokens are not on disk, so that files are not too small.
_LEAST_TOKENS = 256
# Maximum number of texts that wait to be written; the oldest is dropped then.
_MOST_WAITING = 256
# Seconds without writing after a file could not be written.
_PAUSE_S = 60.0
# Seconds between two attempts to get the lock while another server writes, and seconds until writing is paused.
_LOCK_EVERY_S, _LOCK_S = 0.05, 10.0
# Number of a text's last state snapshots that are written: the next turn may differ shortly before the text's end.
_STATES = 3


class PrefixWriter:
    """Writes one text at a time.

    task: the task that writes; None: nothing is written.
    """

    def __init__(
        self,
        folder: PrefixFolder,
        block_bytes: int,
        snapshot_bytes: int,
        shards: ShardedClient,
        lending: Lending,
        refresh: Callable[[], Awaitable[None]],
        metrics: PrefixDiskMetrics,
    ) -> None:
        """block_bytes, snapshot_bytes: bytes of a KV block and of a state snapshot, summed over all shards.

        refresh: lists the folder again, after other servers have changed it.
        """
        self._folder, self._block_bytes, self._snapshot_bytes = folder, block_bytes, snapshot_bytes
        self._shards = shards
        self._lending = lending
        self._refresh = refresh
        self._metrics = metrics
        self._waiting: deque[CachedText] = deque(maxlen=_MOST_WAITING)
        self._namespace: str | None = None  # of the text that is written
        self._pause_until = 0.0
        self.task: asyncio.Task[None] | None = None

    def add(self, text: CachedText) -> None:
        """Queues the blocks of a text to be written, unless they are on disk already."""
        self._waiting.append(text)
        if self.task is None:
            self.task = asyncio.create_task(self._write_all())

    async def forget(self, namespace: str) -> int:
        """Deletes the files of a namespace. Returns how many files, counting those of all shards as one."""
        kept = [text for text in self._waiting if text.namespace != namespace]
        self._waiting.clear()
        self._waiting.extend(kept)
        if self._namespace == namespace:
            self._namespace = None
        return await self._delete(namespace)

    async def _delete(self, namespace: str) -> int:
        files = self._folder.forget(namespace)
        await asyncio.to_thread(self._folder.delete, files)
        self._metrics.held(self._folder.bytes)
        return len(files)

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                text = self._waiting.popleft()
                if asyncio.get_running_loop().time() >= self._pause_until and await self._lock():
                    try:
                        self._namespace = text.namespace
                        await self._write(text)
                        if self._namespace is None:  # it was forgotten meanwhile
                            await self._delete(text.namespace)
                    finally:
                        self._folder.unlock()
        except RouterError as error:
            logger.error("cached prefixes are not written to disk any more: %s", error)
        finally:
            self.task = None
            self._lending.on_change()

    async def _lock(self) -> bool:
        """Locks the folder. Returns False if another server holds the lock too long, or the folder cannot be read."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while not self._folder.lock():
            if loop.time() - since > _LOCK_S:
                self._pause("another server is writing there")
                return False
            await asyncio.sleep(_LOCK_EVERY_S)
        try:
            if self._folder.changed:
                await self._refresh()
        except OSError as error:
            self._folder.unlock()
            self._pause(str(error))
            return False
        return True

    def _pause(self, reason: str) -> None:
        logger.warning("cached prefixes are not written to disk for %d s: %s", _PAUSE_S, reason)
        self._metrics.failed("store")
        self._pause_until = asyncio.get_running_loop().time() + _PAUSE_S

    async def _write(self, text: CachedText) -> None:
        """Writes the blocks of a text that are not on disk, in several files, as far as they are still in memory."""
        folder, memory = self._folder, self._lending.memory
        root, size = folder.root(text.adapter, text.namespace), memory.block_size
        digests = list(folder.chain(root, text.tokens, size))
        start = next((index for index, digest in enumerate(digests) if folder.find(digest) is None), len(digests))
        if (len(digests) - start) * size < (1 if text.named else _LEAST_TOKENS):
            return
        while start < len(digests):
            stop = min(start + MOST_ENTRIES, len(digests))
            cached = memory.cached_blocks(text.space, text.tokens[: stop * size * WIDTH])
            if len(cached) < stop:
                return
            before = digests[start - 1] if start else root
            if not await self._store(text, before, digests[start:stop], cached[start:stop]):
                return
            start = stop
        if memory.snapshots is not None:
            for length, snapshot in memory.snapshots.after(text.space, text.tokens)[-_STATES:]:
                digest = digests[length // size - 1]
                if folder.find(digest, state=True) is None and not await self._store(
                    text, root, [digest], [], snapshot
                ):
                    return

    async def _store(
        self, text: CachedText, before: bytes, digests: list[bytes], blocks: list[int], snapshot: int = 0
    ) -> bool:
        """Writes blocks or a snapshot to a file. Returns False if that is not possible. Raises RouterError.

        before: the digest before the first of `digests`.
        """
        folder, lending = self._folder, self._lending
        file = folder.new_file(folder.namespace(text.namespace), digests, state=snapshot > 0)
        request = pb.PrefixFile(
            path=str(folder.path(file)),
            before=before,
            digests=b"".join(digests),
            block_ids=blocks,
            snapshot=snapshot,
        )
        lending.lend(blocks, snapshot)
        try:
            stored = await lending.settled(lending.batch_id) and await self._write_file(file, request)
            lending.give_back(blocks, snapshot)
        finally:
            lending.on_change()
        return stored

    async def _write_file(self, file: StoredFile, request: pb.PrefixFile) -> bool:
        """Makes room for a file, and has the shards write it. Returns False if that is not possible.

        Raises RouterError if the shards may still be reading the blocks.
        """
        folder = self._folder
        needed = len(request.block_ids) * self._block_bytes or self._snapshot_bytes
        if needed > folder.size:
            return False
        dropped = folder.make_room(needed)
        await asyncio.to_thread(folder.delete, [*dropped, *folder.expired()])
        try:
            file.ranks, file.size = await self._shards.store_file(request)
        except InvalidRequest as error:
            self._pause(str(error))
            return False
        folder.add(file)
        self._metrics.stored(len(request.block_ids) * self._lending.memory.block_size)
        self._metrics.held(folder.bytes)
        return True
