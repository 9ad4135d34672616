"""Files of a simulated shard, read and written when a test wants it, on an event loop with the test's clock."""

import asyncio
import struct
import zlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from shared.stubs import generate_pb2 as pb
from tests.fakes.simulated_shard import SimulatedShard
from tgi_server.prefix_files import DIGEST_BYTES, Header, UnusableFile, file_of
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.scheduling.prefix_disk import DiskPrefixes
from tgi_server.router.scheduling.prefix_folder import PrefixFolder

T = TypeVar("T")

_LAYOUT = b"a simulated one."
_NUMBER_BYTES = 8


class _AtOnce(ThreadPoolExecutor):
    """Does in the calling thread what is submitted, so that a test does the same in each run."""

    def submit(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(work(*arguments, **named))
        return future


class _ClockedLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock_of_test = clock
        super().__init__()

    def time(self) -> float:
        return self._clock_of_test()


class SimulatedDisk:
    """Stands for the part of `ShardedClient` that transfers files; each transfer ends when `finish` is called.

    What is stored is read, and what is loaded is written, as late as possible. Blocks that are loaded have wrong
    contents meanwhile.

    prefixes: the folder, as the scheduler takes it.
    """

    def __init__(self, shard: SimulatedShard, folder: Path, size: int, clock: Callable[[], float]) -> None:
        """size: of all files, in bytes. clock: in seconds."""
        self._shard = shard
        self._loop = _ClockedLoop(clock)
        self._loop.set_default_executor(_AtOnce(1))
        prefixes = PrefixFolder(folder, size, _LAYOUT, max_age_s=1e6)
        prefixes.open()
        self._block_bytes = shard.block_size * _NUMBER_BYTES
        self.prefixes = DiskPrefixes(prefixes, self._block_bytes, 2 * _NUMBER_BYTES)
        self._transfers: list[tuple[asyncio.Event, list[bool]]] = []

    @property
    def transfers(self) -> int:
        """The number of transfers that have begun."""
        return len(self._transfers)

    def within(self, work: Callable[[], T]) -> T:
        """Returns what `work` does on the event loop, and lets its tasks continue."""

        async def do() -> T:
            result = work()
            for _ in range(20):
                await asyncio.sleep(0)
            return result

        return self._loop.run_until_complete(do())

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begins a task on the event loop."""
        self.within(lambda: self._loop.create_task(work))

    def finish(self, index: int, *, well: bool) -> None:
        """Ends a transfer that has begun, well or with an error."""
        ended, outcome = self._transfers.pop(index)
        outcome.append(well)
        self.within(ended.set)

    def close(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()
        self.prefixes.folder.close()

    async def store_file(self, request: pb.PrefixFile) -> tuple[set[int], int]:
        await self._transfer()
        if request.snapshot:
            entries = [struct.pack("<2q", *self._shard.snapshots[request.snapshot])]
        else:
            entries = [
                struct.pack(f"<{self._shard.block_size}q", *self._shard.kv[block]) for block in request.block_ids
            ]
        checksums = tuple(map(zlib.crc32, entries))
        header = Header(_LAYOUT, request.before, _digests(request), len(entries[0]), checksums)
        file_of(Path(request.path), 0).write_bytes(header.packed() + b"".join(entries))
        return {0}, header.file_bytes

    async def load_file(self, request: pb.PrefixFile) -> tuple[int, float]:
        for block in request.block_ids:
            self._shard.kv[block] = [-2] * self._shard.block_size
        await self._transfer()
        path = file_of(Path(request.path), 0)
        try:
            with path.open("rb") as file:
                header = Header.read(file.fileno())
        except (OSError, UnusableFile) as error:
            raise InvalidRequest(str(error)) from error
        digests = _digests(request)
        assert header.digests[request.first : request.first + len(digests)] == digests
        content = path.read_bytes()
        for index in range(len(digests)):
            entry = header.offset(request.first + index)
            values = struct.unpack_from(f"<{header.entry_bytes // _NUMBER_BYTES}q", content, entry)
            if request.snapshot:
                self._shard.snapshots[request.snapshot] = values
            else:
                self._shard.kv[request.block_ids[index]] = list(values)
        return len(digests) * header.entry_bytes, 1e-9

    async def _transfer(self) -> None:
        ended, outcome = asyncio.Event(), list[bool]()
        self._transfers.append((ended, outcome))
        await ended.wait()
        if not outcome[0]:
            raise InvalidRequest("the test wants this transfer to fail")


def _digests(request: pb.PrefixFile) -> tuple[bytes, ...]:
    text = request.digests
    return tuple(text[start : start + DIGEST_BYTES] for start in range(0, len(text), DIGEST_BYTES))
