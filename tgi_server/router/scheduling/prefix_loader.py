"""Reads the stored beginning of a prompt into memory before its request joins."""

import asyncio
import logging

from shared.stubs import generate_pb2 as pb
from tgi_server.router.errors import InvalidRequest, RouterError
from tgi_server.router.metrics import PrefixDiskMetrics
from tgi_server.router.scheduling.deadlines import Forecast
from tgi_server.router.scheduling.lending import Lending
from tgi_server.router.scheduling.pace import Median
from tgi_server.router.scheduling.prefix_folder import PrefixFolder, StoredFile
from tgi_server.router.scheduling.prefix_lookup import WIDTH, StoredPrefix, find_stored
from tgi_server.router.scheduling.sequence import Sequence
from tgi_server.router.scheduling.shard_client import ShardedClient

logger = logging.getLogger(__name__)

# Maximum wait for files: _LATE times the time to compute their tokens, but within these bounds.
_LATE, _EARLIEST_LATE_S, _LATEST_LATE_S = 3.0, 1.0, 10.0
# If reading is slower than computing, prompts are computed; after this many of them, reading is measured again.
_TRIED_AGAIN = 16


class PrefixLoader:
    """Reads files, for one request at a time.

    task: the task that reads; None: nothing is read.
    """

    def __init__(
        self,
        folder: PrefixFolder,
        block_bytes: int,
        snapshot_bytes: int,
        shards: ShardedClient,
        lending: Lending,
        forecast: Forecast,
        metrics: PrefixDiskMetrics,
    ) -> None:
        """block_bytes, snapshot_bytes: bytes of a KV block and of a state snapshot, summed over all shards.

        forecast: estimates the time of a prompt token.
        """
        self._folder, self._block_bytes, self._snapshot_bytes = folder, block_bytes, snapshot_bytes
        self._shards = shards
        self._lending = lending
        self._forecast = forecast
        self._metrics = metrics
        self._byte_s = Median()
        self._passed_over = 0
        self._late = False  # a request waited too long for the file that is read
        self.task: asyncio.Task[None] | None = None

    def prepare(self, sequence: Sequence) -> bool:
        """Returns True if the sequence may join. Starts to read its files if it has any and none are being read."""
        if not sequence.on_disk or self._late:
            return True
        if self.task is not None:
            return False
        stored = find_stored(self._folder, self._lending.memory, sequence)
        if stored is None or not self.is_worth_it(stored):
            sequence.on_disk = 0
            return True
        lending = self._lending
        lending.lend(stored.cached)
        lent = lending.lend_free(
            len(stored.places),
            with_snapshot=stored.state is not None,
            known=sequence.known,
            cached=len(stored.cached),
        )
        if lent is None:
            lending.give_back(stored.cached)
            return True  # there is no room for the sequence itself
        self.task = asyncio.create_task(self._load_for(sequence, stored, *lent, lending.batch_id))
        return False

    def is_worth_it(self, stored: StoredPrefix) -> bool:
        """Returns False if files are read more slowly than their tokens are computed."""
        token_s, byte_s = self._forecast.token_s, self._byte_s.value
        if token_s is None or byte_s is None:
            return True
        size = len(stored.places) * self._block_bytes + (self._snapshot_bytes if stored.state else 0)
        if size * byte_s < stored.gained * token_s:
            return True
        self._passed_over += 1
        if self._passed_over == _TRIED_AGAIN:
            self._byte_s, self._passed_over = Median(), 0
        return False

    async def _load_for(
        self, sequence: Sequence, stored: StoredPrefix, blocks: list[int], snapshot: int, batch_id: int
    ) -> None:
        """Reads stored entries into `blocks` and into a snapshot, and then lets the sequence join.

        batch_id: id of the batch at the time when blocks and snapshot were lent.
        """
        lending, memory, text = self._lending, self._lending.memory, stored.text
        late = asyncio.get_running_loop().call_later(self._late_s(stored), self._give_up, sequence)
        try:
            read = await self._load_files(stored, blocks, snapshot) if await lending.settled(batch_id) else 0
            whole = len(stored.cached) + min(read, len(blocks))
            if read and lending.batch_id == batch_id:
                tokens = text.tokens[: whole * memory.block_size * WIDTH]
                memory.insert(text.space, tokens, stored.cached + blocks[:read])
                if memory.snapshots is not None and snapshot and read > len(blocks):
                    memory.snapshots.put(text.space, tokens, snapshot)
            lending.give_back([*stored.cached, *blocks], snapshot)
        except RouterError as error:  # the shards may still write to the blocks, so these are never given back
            logger.error("cached prefixes were not read from disk: %s", error)
            return
        finally:
            late.cancel()
            self.task, self._late = None, False
            sequence.on_disk = 0
            lending.on_change()
        if read:
            self._metrics.hit(stored.gained)
            await asyncio.to_thread(self._folder.note_use, self._folder.use(stored.files))

    async def _load_files(self, stored: StoredPrefix, blocks: list[int], snapshot: int) -> int:
        """Reads the entries. Returns how many were read, the snapshot included; fewer than all if a file is unusable.

        Raises RouterError if the shards failed, so that the contents of the blocks are unknown.
        """
        read, size, seconds = 0, 0, 0.0
        try:
            for file, first, count in stored.runs():
                run = slice(read, read + count)
                request = pb.PrefixFile(first=first, digests=b"".join(stored.digests[run]), block_ids=blocks[run])
                loaded = await self._load(file, request)
                read, size, seconds = read + count, size + loaded[0], seconds + loaded[1]
            if stored.state is not None:
                file, digest = stored.state
                loaded = await self._load(file, pb.PrefixFile(digests=digest, snapshot=snapshot))
                read, size, seconds = read + 1, size + loaded[0], seconds + loaded[1]
        except InvalidRequest:
            pass  # the rest is computed
        if size:
            self._byte_s.add(seconds, size)
            self._metrics.loaded(seconds)
        return read

    async def _load(self, file: StoredFile, request: pb.PrefixFile) -> tuple[int, float]:
        """Reads from a file. Returns bytes and seconds. Raises InvalidRequest for an unusable file, and RouterError."""
        request.path = str(self._folder.path(file))
        try:
            return await self._shards.load_file(request)
        except InvalidRequest as error:
            self._folder.drop(file)
            if await asyncio.to_thread(self._folder.exists, file):  # or another server has made room
                logger.warning("the cached prefix %s cannot be read, and is deleted: %s", file.stem, error)
                self._metrics.failed("load")
                await asyncio.to_thread(self._folder.delete, [file])
            self._metrics.held(self._folder.bytes)
            raise

    def _late_s(self, stored: StoredPrefix) -> float:
        """Returns the seconds after which a request no longer waits for its files."""
        token_s = self._forecast.token_s
        if token_s is None:
            return _LATEST_LATE_S
        return min(max(_LATE * token_s * stored.gained, _EARLIEST_LATE_S), _LATEST_LATE_S)

    def _give_up(self, sequence: Sequence) -> None:
        logger.warning("the disk with cached prefixes is slow: request %d is computed", sequence.id)
        self._metrics.failed("slow")
        self._late = True
        self._lending.on_change()
