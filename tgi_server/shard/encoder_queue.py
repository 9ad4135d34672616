"""The queue of texts and images to encode, and the thread that computes them between the steps of the engine."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from tgi_server.contract import Task
from tgi_server.engine.encoders import Encoder, Text, finished
from tgi_server.engine.memory import HOST, use_device
from tgi_server.shard.turns import Turns

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Maximum tokens of a batch of several texts.
_MOST_TOKENS = 4_096
# Tokens of the texts from which batches of similar length are formed.
_WINDOW_TOKENS = 8 * _MOST_TOKENS
# Maximum tokens of a batch, next to a text-generation model, before the cost of a layer has been measured.
_UNMEASURED_TOKENS = 512
# Number of last batches whose median is the cost of a token: a single batch may have been disturbed.
_RECENT_BATCHES = 15


@dataclass(eq=False, slots=True)
class _Encoding:
    """One request.

    left: indices of its texts that have not been computed, the shortest first. target_gap_s: target seconds between two
    generated tokens of the text-generation model.
    """

    texts: Sequence[Text]
    left: list[int]
    target_gap_s: float | None
    rows: list[Tensor | None]
    done: Future[Tensor] = field(default_factory=Future)


class EncoderQueue:
    """Encodes the texts of all requests in one thread, texts of similar length together.

    Requests share the thread: each waiting request gets an equal share of a window of texts.
    """

    def __init__(
        self, encoders: Mapping[Task, Encoder], turns: Turns, device: torch.device = HOST, *, beside: bool = False
    ) -> None:
        """turns: shared with the steps of the text-generation model. device: of the encoders. beside: True if there is
        such a model.
        """
        self.encoders = encoders
        self._beside = beside
        self.turns = turns
        self._jobs: dict[Task, deque[_Encoding]] = {task: deque() for task in encoders}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "encoder", initializer=_begin, initargs=(torch.get_num_threads(), device))
        # Seconds of a token in one layer, measured with each of the last batches.
        self._token_seconds = {task: deque[float](maxlen=_RECENT_BATCHES) for task in encoders}
        self._layer_seconds: list[float] = []
        self._layer_began: float | None = None
        for encoder in encoders.values():
            encoder.between = self._between_layers

    async def encode(
        self, task: Task, texts: Sequence[Text], *, dimensions: int, unit: bool, target_gap_s: float | None
    ) -> Tensor:
        """Returns the values, float32 [texts, columns]. If the caller is cancelled, the rest is not computed.

        dimensions: number of columns; 0: all. unit: True normalizes rows to length 1. target_gap_s: as in `Turns`.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index].ids))
        job = _Encoding(texts, order, target_gap_s, [None] * len(texts))
        with self._lock:
            self._jobs[task].append(job)
        self._thread.submit(self._work, task)
        try:
            values = await asyncio.wrap_future(job.done)
        except asyncio.CancelledError:
            job.left = []
            raise
        return finished(values, dimensions, unit=unit)

    async def run(self, work: Callable[[Callable[[], None], Callable[[], float]], T], target_gap_s: float | None) -> T:
        """Runs `work` in the thread, and returns its result.

        work: computes in pieces. It gets two functions: one to call before each piece, and one that returns the seconds
        that the piece may take.
        """
        return await asyncio.wrap_future(self._thread.submit(self._run, work, target_gap_s))

    def _run(self, work: Callable[[Callable[[], None], Callable[[], float]], T], target_gap_s: float | None) -> T:
        with self.turns.pieces():
            return work(self.turns.pause, lambda: self.turns.piece_seconds(target_gap_s))

    def close(self) -> None:
        """Ends the thread. Waiting requests get no answer."""
        with self._lock:
            for jobs in self._jobs.values():
                for job in jobs:
                    job.left = []
                jobs.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _work(self, task: Task) -> None:
        """Computes one window of texts, and submits itself again while texts are left."""
        with self._lock:
            window = self._window(task)
        if not window:
            return
        try:
            with torch.inference_mode(), self.turns.pieces():
                self._compute(task, window)
        except Exception as error:
            logger.error("encoding failed: %s", error, exc_info=error)
            for job in {job for job, _ in window}:
                job.left = []
                if not job.done.done():
                    job.done.set_exception(error)
        for job in {job for job, _ in window}:
            if not job.done.done() and all(row is not None for row in job.rows):
                job.done.set_result(torch.stack([row for row in job.rows if row is not None]))
        self._thread.submit(self._work, task)

    def _window(self, task: Task) -> list[tuple[_Encoding, int]]:
        """Takes texts out of the queue: from each request its share, the longest texts first."""
        jobs = self._jobs[task]
        window: list[tuple[_Encoding, int]] = []
        for job, others in zip(list(jobs), range(len(jobs), 0, -1), strict=True):
            room = (_WINDOW_TOKENS - sum(len(job.texts[number].ids) for job, number in window)) // others
            while job.left and room > 0:
                number = job.left.pop()
                room -= len(job.texts[number].ids)
                window.append((job, number))
            if not job.left:
                jobs.remove(job)
        return window

    def _compute(self, task: Task, window: Sequence[tuple[_Encoding, int]]) -> None:
        encoder = self.encoders[task]
        texts = [job.texts[number] for job, number in window]
        for batch in encoder.batches(texts, self._most_tokens(task, window)):
            self._layer_seconds, self._layer_began = [], None
            values = encoder.encode([texts[index] for index in batch])
            if self._layer_seconds:
                tokens = len(batch) * max(len(texts[index].ids) for index in batch)
                self._token_seconds[task].append(median(self._layer_seconds) / tokens)
            for index, row in zip(batch, values, strict=True):
                job, text = window[index]
                job.rows[text] = row
            self.turns.pause()

    def _most_tokens(self, task: Task, window: Sequence[tuple[_Encoding, int]]) -> int:
        """Returns the maximum tokens of a batch such that each layer takes no longer than a piece may."""
        if not self._beside:
            return _MOST_TOKENS
        if not self._token_seconds[task]:
            return _UNMEASURED_TOKENS
        cost = median(self._token_seconds[task])
        seconds = min(self.turns.piece_seconds(job.target_gap_s) for job, _ in window)
        return min(_MOST_TOKENS, int(seconds / cost))

    def _between_layers(self) -> None:
        """Measures the last layer, and lets a waiting step go first."""
        if self._layer_began is not None:
            self._layer_seconds.append(time.perf_counter() - self._layer_began)
        self.turns.pause()
        self._layer_began = time.perf_counter()


def _begin(threads: int, device: torch.device) -> None:
    """Sets the number of torch's threads, and the device, for the thread that calls it."""
    torch.set_num_threads(threads)
    use_device(device)
