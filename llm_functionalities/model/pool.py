"""A pool of worker threads that all calls share fairly."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from llm_functionalities.errors import NoThread

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class _Batch:
    """The jobs of one batch that no thread has taken. A job is made when it is taken, to save memory."""

    def __init__(self, size: int, job: Callable[[int], None]) -> None:
        self._size = size
        self._job = job
        self._begun = 0

    @property
    def waiting(self) -> int:
        return self._size - self._begun

    def take(self) -> Job:
        """Returns the next job. There has to be one."""
        self._begun += 1
        return partial(self._job, self._begun - 1)

    def drop(self) -> None:
        """Drops the jobs that no thread has taken."""
        self._begun = self._size


class FairPool:
    """Runs jobs in at most `threads` threads, which it starts when they are first needed.

    The next job is in turn a single job and a job of a batch, and the batches take turns as well. The jobs of batches
    hold at most `batch_threads` threads at a time, so a single job never waits for the end of a long batch.
    """

    def __init__(self, threads: int, batch_threads: int) -> None:
        self._limit = threads
        self._batch_limit = batch_threads
        self._changed = threading.Condition()
        self._singles: deque[Job] = deque()
        self._batches: deque[_Batch] = deque()
        self._batch_running = 0
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._batch_turn = False
        self._stopping = False

    @property
    def waiting(self) -> int:
        """The number of jobs that no thread has begun."""
        with self._changed:
            return len(self._singles) + sum(batch.waiting for batch in self._batches)

    def run(self, job: Job) -> None:
        """Queues `job`, which must not raise. Raises NoThread if the pool has no thread and can start none."""
        with self._changed:
            self._singles.append(job)
            self._wake()

    def run_batch(self, size: int, job: Callable[[int], None]) -> Callable[[], None]:
        """Queues `job(0)` to `job(size - 1)`. Returns a function that drops those that no thread has taken.

        Raises NoThread if the pool has no thread and can start none.
        """
        batch = _Batch(size, job)
        with self._changed:
            self._batches.append(batch)
            self._wake()

        def drop() -> None:
            with self._changed:
                batch.drop()

        return drop

    def stop(self, timeout: float) -> None:
        """Ends the threads once their current jobs are done; waits for them for `timeout` seconds in all."""
        with self._changed:
            self._stopping = True
            self._singles.clear()
            self._batches.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout / max(1, len(self._threads)))

    def _wake(self) -> None:
        """Wakes or starts a thread for each job that may run now."""
        of_batches = sum(batch.waiting for batch in self._batches)
        jobs = len(self._singles) + min(of_batches, self._batch_limit - self._batch_running)
        for _ in range(min(jobs - self._idle, self._limit - len(self._threads))):
            thread = threading.Thread(target=self._work, name=f"worker {len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system allows no more threads at the moment
                if self._threads:
                    break  # the running threads will take these jobs
                self._singles.clear()
                self._batches.clear()
                raise NoThread(f"the service can start no thread: {error}") from None
            self._threads.append(thread)
        self._changed.notify(jobs)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            job, of_batch = taken
            try:
                job()
            except Exception:
                logger.exception("a worker's job failed")
            if of_batch:
                with self._changed:
                    self._batch_running -= 1
                    self._changed.notify()

    def _take(self) -> tuple[Job, bool] | None:
        """Waits for a job and returns it, with True if it is part of a batch. Returns None when the pool stops."""
        with self._changed:
            while not self._stopping:
                if self._batch_turn or not self._singles:
                    job = self._take_of_batch()
                    if job is not None:
                        self._batch_turn = False
                        return job, True
                if self._singles:
                    self._batch_turn = True
                    return self._singles.popleft(), False
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return None

    def _take_of_batch(self) -> Job | None:
        if self._batch_running >= self._batch_limit:
            return None
        while self._batches:
            batch = self._batches.popleft()
            if batch.waiting:
                self._batches.append(batch)
                self._batch_running += 1
                return batch.take()
        return None
