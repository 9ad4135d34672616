"""The calls StoreFile and LoadFile: a shard writes and reads files of cached prefixes."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from shared.stubs import generate_pb2 as pb
from tgi_server.engine import Engine
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.prefix_store import PrefixStore
from tgi_server.prefix_files import DIGEST_BYTES, UnusableFile

T = TypeVar("T")

# Requests wait for reads but not for writes, so the writer has a lower priority than steps.
_WRITER_NICENESS = 10


class PrefixService:
    """Writes and reads files in one thread each, while the event loop computes steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store: PrefixStore | None = None
        self._writer = ThreadPoolExecutor(1, "prefix-writer", initializer=_let_others_go_first)
        self._reader = ThreadPoolExecutor(1, "prefix-reader")

    def describe(self) -> pb.DescribeFilesResponse:
        """Returns layout and sizes of the files. Call it after each warm-up. Raises InvalidCall without support."""
        self._store = store = self._engine.prefix_store()
        snapshot_bytes = store.snapshots.entry_bytes if store.snapshots is not None else 0
        return pb.DescribeFilesResponse(
            layout=store.blocks.layout, block_bytes=store.blocks.entry_bytes, snapshot_bytes=snapshot_bytes
        )

    async def store(self, request: pb.PrefixFile) -> int:
        """Writes a file. Returns the bytes written. Raises InvalidCall."""
        return await self._run(
            self._writer,
            lambda store: store.store(
                Path(request.path), request.before, _digests(request), request.block_ids, request.snapshot
            ),
        )

    async def load(self, request: pb.PrefixFile) -> tuple[int, float]:
        """Reads from a file. Returns the bytes read, and the seconds that it took. Raises InvalidCall."""

        def load(store: PrefixStore) -> tuple[int, float]:
            began = time.perf_counter()
            path, digests = Path(request.path), _digests(request)
            size = store.load(path, request.first, digests, request.block_ids, request.snapshot)
            return size, time.perf_counter() - began

        return await self._run(self._reader, load)

    async def _run(self, thread: ThreadPoolExecutor, work: Callable[[PrefixStore], T]) -> T:
        if self._store is None:
            raise InvalidCall("ask for the description of files first")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work, self._store)
        except (OSError, UnusableFile) as error:
            raise InvalidCall(str(error)) from error


def _digests(request: pb.PrefixFile) -> list[bytes]:
    text = request.digests
    return [text[start : start + DIGEST_BYTES] for start in range(0, len(text), DIGEST_BYTES)]


def _let_others_go_first() -> None:
    with suppress(OSError):  # on systems without priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)
