"""The processes that decode and process images: started when there are any, replaced when they die."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from shared.pipes import WorkerProcess, read, receive, send
from tgi_server.contract import Tensor
from tgi_server.fairness import FairQueue
from tgi_server.router.errors import DecodingFailed
from tgi_server.router.media.messages import ImageResult, ImageTask, UnusableImage
from tgi_server.shared_bytes import MemoryPlace, SharedBytes, SharedMemory

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds for the libraries that a worker imports at its start, and for one image.
_START_SECONDS = 120.0
_IMAGE_SECONDS = 30.0
# Seconds for which a worker continues an image whose clients have left: another worker takes longer to start.
_LEFT_SECONDS = 1.0
_LONGEST_REASON = 300


class Workers:
    """Runs each image in one of at most `most` processes. Clients take turns."""

    def __init__(
        self,
        folder: Path,
        most: int,
        most_pixels: int,
        image_seconds: float = _IMAGE_SECONDS,
        *,
        least_shared: int | None = None,
    ) -> None:
        """least_shared: from this many bytes on an image's tensors are left in shared memory; None: they never are."""
        program = [sys.executable, "-m", "tgi_server.router.media.worker"]
        self._command = [*program, str(folder), str(most_pixels), str(-1 if least_shared is None else least_shared)]
        self._image_seconds = image_seconds
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._queue = FairQueue(most)
        self._threads = ThreadPoolExecutor(most, "images")

    async def process(self, data: bytes, detail: str, client: str, work: int) -> tuple[ImageResult, tuple[Tensor, ...]]:
        """Runs the model's image processor on an image. Returns its result and its tensors.

        client: clients take turns. work: a client's waiting images are processed in ascending order of this number.

        Raises UnusableImage or DecodingFailed. When it is cancelled, it ends within about a second.
        """
        async with self._queue.place(client, work):
            worker = await self._free_worker()
            try:
                result, tensors = await self._run(
                    worker, lambda: worker.process(data, detail), self._image_seconds, _LEFT_SECONDS
                )
            except TimeoutError:
                raise UnusableImage(f"it takes more than {self._image_seconds:.0f} s to decode") from None
            self._idle.append(worker)
        if result.error:
            raise UnusableImage(result.error)
        return result, tensors

    def close(self) -> None:
        for worker in list(self._all):
            worker.kill()
            worker.wait()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _free_worker(self) -> "_Worker":
        while self._idle:
            worker = self._idle.pop()
            if worker.poll() is None:
                return worker
            self._end(worker)
        worker = await asyncio.get_running_loop().run_in_executor(self._threads, _Worker, self._command)
        self._all.add(worker)
        try:
            error = await self._run(worker, worker.started, _START_SECONDS, _START_SECONDS)
        except TimeoutError:
            error = f"it did not start within {_START_SECONDS:.0f} s"
        if error:
            self._end(worker)
            logger.error("images cannot be decoded: %s", error)
            raise DecodingFailed(f"images cannot be decoded: {error[:_LONGEST_REASON]}")
        return worker

    async def _run(self, worker: "_Worker", work: Callable[[], T], seconds: float, left_seconds: float) -> T:
        """Runs `work`, which waits for a worker, in a thread. A worker that is late or has died is ended.

        left_seconds: time that a worker has to finish after a cancellation; after it the worker is ended, too.

        Raises TimeoutError or DecodingFailed.
        """
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(running)
        except asyncio.CancelledError:
            try:
                await asyncio.wait((running,), timeout=left_seconds)
            finally:
                if running.done() and not running.cancelled() and running.exception() is None:
                    self._idle.append(worker)
                else:
                    self._end(worker)
            raise
        except (EOFError, OSError) as error:
            status = worker.poll()
            self._end(worker)
            if isinstance(error, TimeoutError):
                raise
            logger.warning("a process that decodes images died with the status %s", status)
            raise DecodingFailed("the process that decoded an image died; the next image gets another one") from None
        except BaseException:
            self._end(worker)
            raise

    def _end(self, worker: "_Worker") -> None:
        self._all.discard(worker)
        worker.kill()
        self._threads.submit(worker.wait)  # the system takes a while to free its memory


class _Worker(WorkerProcess):
    """One process. Its methods wait for it, so they are for threads."""

    def __init__(self, command: list[str]) -> None:
        # A session of its own: a terminal's interrupt stops the router, which lets running requests finish.
        super().__init__(command, stderr=subprocess.DEVNULL, start_new_session=True)

    def started(self) -> str:
        """Returns why the worker cannot process images, once its libraries are imported; nothing if it can."""
        return receive(self.results, ImageResult).error

    def process(self, data: bytes, detail: str) -> tuple[ImageResult, tuple[Tensor, ...]]:
        send(self.tasks, ImageTask(len(data), detail), data)
        result = receive(self.results, ImageResult)
        memory = self._memory(result)
        tensors: list[Tensor] = []
        for array in result.arrays:
            if memory is None or array.start is None:
                content: bytes | SharedBytes = read(self.results, array.size)
            else:
                content = SharedBytes(memory.place, array.start, array.size, memory)
            tensors.append(Tensor(array.name, array.dtype, array.shape, content))
        return result, tuple(tensors)

    def _memory(self, result: ImageResult) -> SharedMemory | None:
        """Opens the memory that the tensors of an image are in, which the worker then closes. Raises OSError."""
        if result.descriptor < 0:
            return None
        memory = SharedMemory.open(MemoryPlace(self.pid, result.descriptor, result.inode))
        self.tasks.write(b"\0")
        self.tasks.flush()
        return memory
