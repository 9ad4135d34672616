"""Cached prefixes on disk: written when a request has ended, read before one joins that begins with them.

Shards write and read beside the steps of other requests. Blocks are lent to them meanwhile, and only once the shards
have answered all steps that were sent before: these may still write into blocks that were granted anew.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

from shared.stubs import generate_pb2 as pb
from tgi_server.prefix_files import MOST_ENTRIES
from tgi_server.router.errors import InvalidRequest, RouterError
from tgi_server.router.metrics import Metrics
from tgi_server.router.scheduling.batch import Batch
from tgi_server.router.scheduling.deadlines import Forecast
from tgi_server.router.scheduling.memory import Memory, PagedMemory, space_of
from tgi_server.router.scheduling.pace import Median
from tgi_server.router.scheduling.prefix_cache import Space
from tgi_server.router.scheduling.prefix_folder import PrefixFolder, StoredFile
from tgi_server.router.scheduling.sequence import Sequence
from tgi_server.router.scheduling.shard_client import ShardedClient

logger = logging.getLogger(__name__)

_WIDTH = 4  # bytes of a token
# A text without a name is written once this many of its tokens are not on disk: files have some MB.
_LEAST_TOKENS = 256
# Ended requests that wait to be written; then the oldest is passed over.
_MOST_WAITING = 256
# Seconds without writing after a file could not be written.
_PAUSE_S = 60.0
# The longest wait for a file: three times what it takes to compute, and between these bounds.
_LATE, _EARLIEST_LATE_S, _LATEST_LATE_S = 3.0, 1.0, 10.0
# What is read more slowly than computed is computed; after so many such prompts it is tried again.
_TRIED_AGAIN = 16
_EXPIRY_S = 3600.0
# Snapshots of states of a text that are written, the last ones: a next turn may part from it a little before its end.
_STATES = 3
_LAST_WRITES_S = 5.0


@dataclass(frozen=True, slots=True)
class DiskPrefixes:
    """A folder that was opened, and the bytes of a block, and of a snapshot of states, in all shards together."""

    folder: PrefixFolder
    block_bytes: int
    snapshot_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Text:
    """A text whose blocks are cached. tokens: 4 bytes each. named: it is written whole."""

    space: Space
    namespace: str
    tokens: bytes
    named: bool


@dataclass(frozen=True, slots=True)
class _Found:
    """Entries on disk that continue what is in memory of a prompt.

    text: up to the end of that. cached: its blocks in memory. places: of each further block. state: of the state after
    the text, if sequences have states and that one is not in memory. gained: tokens that need not be computed.
    """

    text: _Text
    cached: list[int]
    places: list[tuple[StoredFile, int]]
    digests: list[bytes]
    state: tuple[StoredFile, bytes] | None
    gained: int

    @property
    def files(self) -> list[StoredFile]:
        state = [] if self.state is None else [self.state[0]]
        return [*dict.fromkeys(file for file, _ in self.places), *state]


class PrefixDisk:
    """Reads for one request at a time, and writes for one at a time.

    loading: a request waits for files. busy: blocks are lent, so that others may lack them.
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
        assert isinstance(batch.memory, PagedMemory)
        self._folder, self._block_bytes, self._snapshot_bytes = disk.folder, disk.block_bytes, disk.snapshot_bytes
        self._shards = shards
        self._batch, self._memory = batch, batch.memory
        self._next_response = next_response
        self._forecast = forecast
        self._metrics = metrics.prefixes
        self._on_change = work.set
        self._byte_s = Median()
        self._passed_over = 0
        self._late = False  # a request waited too long for the file that is read
        self._reading: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._waiting: deque[_Text] = deque(maxlen=_MOST_WAITING)
        self._namespace: str | None = None  # of the text that is written
        self._pause_until = 0.0
        self._expiring = asyncio.create_task(self._expire())
        self._metrics.held(self._folder.bytes)

    @property
    def busy(self) -> bool:
        return self._reading is not None or self._writing is not None

    async def stop(self) -> None:
        """Waits a moment for what is to be written."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_LAST_WRITES_S)
        for task in (self._reading, self._writing, self._expiring):
            if task is not None:
                task.cancel()

    def look_up(self, sequence: Sequence) -> None:
        """Notes how many of the sequence's known tokens disk and memory have, if the disk has some more of them."""
        if not sequence.reports_prompt and (found := self._find(sequence)) is not None:
            sequence.on_disk = len(found.text.tokens) // _WIDTH
            sequence.likely_cached = max(sequence.likely_cached, sequence.on_disk)

    def prepare(self, sequence: Sequence) -> bool:
        """Returns True if the sequence may join. If files are to be read for it first, that begins when it can."""
        if not sequence.on_disk or self._late:
            return True
        if self._reading is not None:
            return False
        found = self._find(sequence)
        if found is None or not self._is_worth_it(found):
            sequence.on_disk = 0
            return True
        memory, number = self._memory, len(found.places)
        memory.lend(found.cached)
        spare = -(-sequence.known // memory.block_size) - len(found.cached) - number + len(self._batch)
        blocks = memory.lend_free(number, spare)
        snapshot = memory.snapshots.lend_free() if memory.snapshots is not None and found.state is not None else 0
        if len(blocks) < number or bool(snapshot) != (found.state is not None):
            self._give_back([*found.cached, *blocks], snapshot)
            return True  # there is no room for the sequence itself
        self._reading = asyncio.create_task(self._read(sequence, found, blocks, snapshot, self._batch.id))
        return False

    def computed(self, sequence: Sequence) -> None:
        """Has what the cache has of a sequence written, unless the disk has it."""
        request, size = sequence.request, self._memory.block_size
        if sequence.settled < size or sequence.adapter is not None:
            return
        tokens = sequence.beginning(sequence.settled // size * size)
        named = request.keep is not None
        self._waiting.append(_Text(space_of(sequence), request.cache_namespace, tokens, named))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())

    async def forget(self, namespace: str) -> int:
        """Deletes the files of a namespace. Returns how many texts, or parts of a text, they were."""
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

    def _find(self, sequence: Sequence) -> _Found | None:
        """Returns None if the disk has nothing of the sequence that memory has not."""
        if sequence.adapter is not None:
            return None
        memory, folder, namespace = self._memory, self._folder, sequence.request.cache_namespace
        snapshots, space, size = memory.snapshots, space_of(sequence), memory.block_size
        # The last token is computed. Its block may be read for those before it, but a state after it is of no use.
        tokens = sequence.beginning(sequence.known if snapshots is None else sequence.known - 1)
        cached = memory.cached_blocks(space, tokens)
        states = None if snapshots is None else dict(snapshots.after(space, tokens[: len(cached) * size * _WIDTH]))
        usable = len(cached) if states is None else max(states, default=0) // size
        digests: list[bytes] = []
        places: list[tuple[StoredFile, int]] = []
        end, state = 0, None  # of the longest beginning from which the prompt can continue
        for number, digest in enumerate(folder.chain(folder.root("", namespace), tokens, size), start=1):
            if number > len(cached):
                if (place := folder.find(digest)) is None:
                    break
                digests.append(digest)
                places.append(place)
            stored = None if states is None else folder.find(digest, state=True)
            if number > usable and (states is None or stored is not None):
                end, state = number, None if stored is None else (stored[0], digest)
        if not end:
            return None
        read = max(0, end - len(cached))
        text = _Text(space, namespace, tokens[: end * size * _WIDTH], named=False)
        return _Found(text, cached[:end], places[:read], digests[:read], state, (end - usable) * size)

    def _is_worth_it(self, found: _Found) -> bool:
        """Returns False if files are read more slowly than their tokens are computed."""
        token_s, byte_s = self._forecast.token_s, self._byte_s.value
        if token_s is None or byte_s is None:
            return True
        size = len(found.places) * self._block_bytes + (self._snapshot_bytes if found.state else 0)
        if size * byte_s < found.gained * token_s:
            return True
        self._passed_over += 1
        if self._passed_over == _TRIED_AGAIN:
            self._byte_s, self._passed_over = Median(), 0
        return False

    async def _read(self, sequence: Sequence, found: _Found, blocks: list[int], snapshot: int, batch_id: int) -> None:
        """Reads what was found into `blocks` and into a snapshot, and lets the sequence join.

        batch_id: of the batch when blocks and snapshot were lent.
        """
        memory, text = self._memory, found.text
        late = asyncio.get_running_loop().call_later(self._late_s(found), self._give_up, sequence)
        try:
            read = await self._read_files(found, blocks, snapshot) if await self._settled(batch_id) else 0
            whole = len(found.cached) + min(read, len(blocks))
            if read and self._batch.id == batch_id:
                tokens = text.tokens[: whole * memory.block_size * _WIDTH]
                memory.insert(text.space, tokens, found.cached + blocks[:read])
                if memory.snapshots is not None and snapshot and read > len(blocks):
                    memory.snapshots.put(text.space, tokens, snapshot)
            self._give_back([*found.cached, *blocks], snapshot)
        except RouterError as error:  # the shards may still write into the blocks: nobody gets them any more
            logger.error("cached prefixes were not read from disk: %s", error)
            return
        finally:
            late.cancel()
            self._reading, self._late = None, False
            sequence.on_disk = 0
            self._on_change()
        if read:
            self._metrics.hit(found.gained)
            await asyncio.to_thread(self._folder.note_use, self._folder.use(found.files))

    async def _read_files(self, found: _Found, blocks: list[int], snapshot: int) -> int:
        """Returns how many blocks were read, and the snapshot as one more: fewer if a file is of no use.

        Raises RouterError if it is not known what was read.
        """
        read, size, seconds = 0, 0, 0.0
        try:
            for file, first, number in _runs(found.places):
                part = slice(read, read + number)
                request = pb.PrefixFile(first=first, digests=b"".join(found.digests[part]), block_ids=blocks[part])
                loaded = await self._load(file, request)
                read, size, seconds = read + number, size + loaded[0], seconds + loaded[1]
            if found.state is not None:
                file, digest = found.state
                loaded = await self._load(file, pb.PrefixFile(digests=digest, snapshot=snapshot))
                read, size, seconds = read + 1, size + loaded[0], seconds + loaded[1]
        except InvalidRequest:
            pass  # the rest is computed
        if size:
            self._byte_s.add(seconds, size)
            self._metrics.loaded(seconds)
        return read

    def _give_back(self, blocks: list[int], snapshot: int) -> None:
        self._memory.give_back(blocks)
        if snapshot and self._memory.snapshots is not None:
            self._memory.snapshots.give_back(snapshot)

    async def _load(self, file: StoredFile, request: pb.PrefixFile) -> tuple[int, float]:
        """Reads from a file. Returns bytes and seconds. Raises InvalidRequest for one of no use, and RouterError."""
        request.path = str(self._folder.path(file))
        try:
            return await self._shards.load_file(request)
        except InvalidRequest as error:
            logger.warning("the cached prefix %s cannot be read, and is deleted: %s", file.stem, error)
            self._metrics.failed("load")
            await asyncio.to_thread(self._folder.delete, [self._folder.drop(file)])
            self._metrics.held(self._folder.bytes)
            raise

    def _late_s(self, found: _Found) -> float:
        """Returns the seconds after which a request no longer waits for what was found."""
        token_s = self._forecast.token_s
        if token_s is None:
            return _LATEST_LATE_S
        return min(max(_LATE * token_s * found.gained, _EARLIEST_LATE_S), _LATEST_LATE_S)

    def _give_up(self, sequence: Sequence) -> None:
        logger.warning("the disk with cached prefixes is slow: request %d is computed", sequence.id)
        self._metrics.failed("slow")
        self._late = True
        self._on_change()

    async def _settled(self, batch_id: int) -> bool:
        """Waits until all steps that were sent are answered. Returns False if the shards have forgotten the batch."""
        batch, sent = self._batch, self._batch.step - 1
        while batch.id == batch_id and batch.answered < sent:
            await self._next_response()
        return batch.id == batch_id

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                text = self._waiting.popleft()
                if perf_counter() >= self._pause_until:
                    self._namespace = text.namespace
                    await self._write(text)
                    if self._namespace is None:  # it was forgotten meanwhile
                        await self._delete(text.namespace)
        except RouterError as error:
            logger.error("cached prefixes are not written to disk any more: %s", error)
        finally:
            self._writing = None
            self._on_change()

    async def _write(self, text: _Text) -> None:
        """Writes the blocks of a text that are not on disk, some at a time, as long as they are in memory."""
        folder, size = self._folder, self._memory.block_size
        root = folder.root("", text.namespace)
        digests = list(folder.chain(root, text.tokens, size))
        start = next((number for number, digest in enumerate(digests) if folder.find(digest) is None), len(digests))
        if (len(digests) - start) * size < (1 if text.named else _LEAST_TOKENS):
            return
        while start < len(digests):
            stop = min(start + MOST_ENTRIES, len(digests))
            cached = self._memory.cached_blocks(text.space, text.tokens[: stop * size * _WIDTH])
            if len(cached) < stop:
                return
            before = digests[start - 1] if start else root
            if not await self._store(text, before, digests[start:stop], cached[start:stop]):
                return
            start = stop
        if self._memory.snapshots is not None:
            for length, number in self._memory.snapshots.after(text.space, text.tokens)[-_STATES:]:
                digest = digests[length // size - 1]
                if folder.find(digest, state=True) is None and not await self._store(text, root, [digest], [], number):
                    return

    async def _store(
        self, text: _Text, before: bytes, digests: list[bytes], blocks: list[int], snapshot: int = 0
    ) -> bool:
        """Writes blocks, or a snapshot, into a file. Returns False if that is not possible. Raises RouterError."""
        folder, memory = self._folder, self._memory
        file = folder.new_file(folder.namespace(text.namespace), digests, state=snapshot > 0)
        request = pb.PrefixFile(
            path=str(folder.path(file)),
            before=before,
            digests=b"".join(digests),
            block_ids=blocks,
            snapshot=snapshot,
        )
        memory.lend(blocks)
        if snapshot and memory.snapshots is not None:
            memory.snapshots.lend(snapshot)
        try:
            stored = await self._settled(self._batch.id) and await self._write_file(file, request)
            self._give_back(blocks, snapshot)
        finally:
            self._on_change()
        return stored

    async def _write_file(self, file: StoredFile, request: pb.PrefixFile) -> bool:
        """Makes room for a file, and has it written. Returns False if that is not possible.

        Raises RouterError if the shards may still read what they were to write.
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
            logger.warning("cached prefixes are not written to disk for %d s: %s", _PAUSE_S, error)
            self._metrics.failed("store")
            self._pause_until = perf_counter() + _PAUSE_S
            return False
        folder.add(file)
        self._metrics.stored(len(request.block_ids) * self._memory.block_size)
        self._metrics.held(folder.bytes)
        return True

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


def _runs(places: list[tuple[StoredFile, int]]) -> list[tuple[StoredFile, int, int]]:
    """Returns which entries follow each other in a file: the file, the first one, and how many they are."""
    runs: list[tuple[StoredFile, int, int]] = []
    for file, place in places:
        if runs and runs[-1][0] is file and runs[-1][1] + runs[-1][2] == place:
            runs[-1] = file, runs[-1][1], runs[-1][2] + 1
        else:
            runs.append((file, place, 1))
    return runs
