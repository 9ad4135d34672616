"""Requests to encode texts and images, and the thread that computes them between the steps of the model that
generates.
"""

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

# Tokens that are encoded together, at most, if they are more than one text.
_MOST_TOKENS = 4_096
# Tokens of the texts among which texts of similar length are looked for.
_WINDOW_TOKENS = 8 * _MOST_TOKENS
# Tokens of a batch beside a model that generates, until it has been measured what a layer costs.
_UNMEASURED_TOKENS = 512
# Batches that the cost of a token is the median of: one batch may have been disturbed.
_RECENT_BATCHES = 15


@dataclass(eq=False, slots=True)
class _Encoding:
    """One request.

    left: the numbers of its texts that have not been computed, the shortest first. target_gap_s: between two tokens of
    the model that generates.
    """

    texts: Sequence[Text]
    left: list[int]
    target_gap_s: float | None
    rows: list[Tensor | None]
    done: Future[Tensor] = field(default_factory=Future)


class EncoderQueue:
    """Computes the texts of all requests, texts of similar length together, in one thread.

    Requests share the thread: of each batch's window every waiting request has an equal part.
    """

    def __init__(
        self, encoders: Mapping[Task, Encoder], turns: Turns, device: torch.device = HOST, *, beside: bool = False
    ) -> None:
        """turns: with the steps of a model that generates. device: of the encoders. beside: there is one."""
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
        """Returns [texts, columns] in float32. What the caller does not wait for any more is not computed."""
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
        """Returns what `work` returns. It computes in pieces: it calls the first function that it is given before each,
        and the second returns the seconds that the piece may take.
        """
        return await asyncio.wrap_future(self._thread.submit(self._run, work, target_gap_s))

    def _run(self, work: Callable[[Callable[[], None], Callable[[], float]], T], target_gap_s: float | None) -> T:
        with self.turns.pieces():
            return work(self.turns.pause, lambda: self.turns.piece_seconds(target_gap_s))

    def close(self) -> None:
        """Ends the thread; requests that wait get no answer."""
        with self._lock:
            for jobs in self._jobs.values():
                for job in jobs:
                    job.left = []
                jobs.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _work(self, task: Task) -> None:
        """Computes one window of texts, and comes again while any are left."""
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
        """Takes texts out of the queue: of every request its share, of a large one the longest first."""
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
        """Returns the most tokens of a batch whose layers each take no longer than a piece may."""
        if not self._beside:
            return _MOST_TOKENS
        if not self._token_seconds[task]:
            return _UNMEASURED_TOKENS
        cost = median(self._token_seconds[task])
        seconds = min(self.turns.piece_seconds(job.target_gap_s) for job, _ in window)
        return min(_MOST_TOKENS, int(seconds / cost))

    def _between_layers(self) -> None:
        """Notes how long the last layer took, and lets a step that waits go first."""
        if self._layer_began is not None:
            self._layer_seconds.append(time.perf_counter() - self._layer_began)
        self.turns.pause()
        self._layer_began = time.perf_counter()


def _begin(threads: int, device: torch.device) -> None:
    """Gives the thread that runs it as many threads of torch, and the device to compute on."""
    torch.set_num_threads(threads)
    use_device(device)
