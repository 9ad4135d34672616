"""Requests to encode texts and images, and the thread that computes them between the steps of the model that
generates.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from tgi_server.contract import Task
from tgi_server.engine.encoders import Encoder, Text, finished

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Tokens that are encoded together, at most, if they are more than one text.
_MOST_TOKENS = 4_096
# Tokens of the texts among which those of similar length are looked for.
_WINDOW_TOKENS = 8 * _MOST_TOKENS
# Tokens of a batch beside a model that generates, until it has been measured what a layer costs.
_UNMEASURED_TOKENS = 512
# Seconds that one layer may take beside a model that generates, unless the router has another target for its tokens.
_LAYER_SECONDS = 0.05
# The share of the target that a layer may take: a step needs the rest.
_LAYER_SHARE = 0.5


class Turns:
    """Lets one thread compute at a time, and steps before layers: a step waits for one layer at most."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps = 0
        self._layer = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Waits until the layer that is computed is done, and keeps further layers from beginning."""
        with self._changed:
            self._steps += 1
            self._changed.wait_for(lambda: not self._layer)
        try:
            yield
        finally:
            with self._changed:
                self._steps -= 1
                self._changed.notify_all()

    @property
    def steps_wait(self) -> bool:
        """Returns True while a step is computed, or waits."""
        return self._steps > 0

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Computes layers in the context; call `pause` between them."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def pause(self) -> None:
        """Lets a step that waits go first."""
        if self._steps:
            self._end()
            self._begin()

    def _begin(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._steps)
            self._layer = True

    def _end(self) -> None:
        with self._changed:
            self._layer = False
            self._changed.notify_all()


@dataclass(eq=False, slots=True)
class _Encoding:
    """One request. left: the numbers of its texts that have not been computed, the shortest first."""

    texts: Sequence[Text]
    left: list[int]
    layer_seconds: float
    rows: list[Tensor | None]
    done: Future[Tensor] = field(default_factory=Future)


class EncoderQueue:
    """Computes the texts of all requests, those of similar length together, in one thread.

    Requests share the thread: of each batch's window every waiting request has an equal part.
    """

    def __init__(self, encoders: Mapping[Task, Encoder], turns: Turns, *, beside: bool = False) -> None:
        """turns: with the steps of a model that generates. beside: there is one."""
        self.encoders = encoders
        self._beside = beside
        self.turns = turns
        self._jobs: dict[Task, deque[_Encoding]] = {task: deque() for task in encoders}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "encoder", initializer=torch.set_num_threads, initargs=_threads())
        # Seconds of a token in one layer, measured with the last batch.
        self._token_seconds = dict.fromkeys(encoders, 0.0)
        self._layer_seconds: list[float] = []
        self._layer_began: float | None = None
        for encoder in encoders.values():
            encoder.between = self._between_layers

    async def encode(
        self, task: Task, texts: Sequence[Text], *, dimensions: int, unit: bool, target_gap_s: float | None
    ) -> Tensor:
        """Returns [texts, columns] in float32. What the caller does not wait for any more is not computed."""
        order = sorted(range(len(texts)), key=lambda each: len(texts[each].ids))
        seconds = _layer_seconds(target_gap_s)
        job = _Encoding(texts, order, seconds, [None] * len(texts))
        with self._lock:
            self._jobs[task].append(job)
        self._thread.submit(self._work, task)
        try:
            values = await asyncio.wrap_future(job.done)
        except asyncio.CancelledError:
            job.left = []
            raise
        unit = unit and not (self.encoders[task].normalizes and not dimensions)
        return finished(values, dimensions, unit=unit)

    async def run(self, work: Callable[[Callable[[], None], float], T], target_gap_s: float | None) -> T:
        """Returns what `work` returns. It computes in pieces of the seconds that it is given, and calls the function
        that it is given before each.
        """
        return await asyncio.wrap_future(self._thread.submit(self._run, work, _layer_seconds(target_gap_s)))

    def _run(self, work: Callable[[Callable[[], None], float], T], seconds: float) -> T:
        with self.turns.layers():
            return work(self.turns.pause, seconds)

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
            with torch.inference_mode(), self.turns.layers():
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
            room = (_WINDOW_TOKENS - sum(len(each.texts[number].ids) for each, number in window)) // others
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
        for batch in encoder.batches(texts, self._most_tokens(task, min(job.layer_seconds for job, _ in window))):
            self._layer_seconds, self._layer_began = [], None
            values = encoder.encode([texts[each] for each in batch])
            if self._layer_seconds:
                tokens = len(batch) * max(len(texts[each].ids) for each in batch)
                self._token_seconds[task] = median(self._layer_seconds) / tokens
            for each, row in zip(batch, values, strict=True):
                job, number = window[each]
                job.rows[number] = row
            self.turns.pause()

    def _most_tokens(self, task: Task, layer_seconds: float) -> int:
        """Returns the most tokens of a batch whose layers take at most these seconds each."""
        if not self._beside:
            return _MOST_TOKENS
        cost = self._token_seconds[task]
        return min(_MOST_TOKENS, int(layer_seconds / cost)) if cost else _UNMEASURED_TOKENS

    def _between_layers(self) -> None:
        """Notes how long the last layer took, and lets a step that waits go first."""
        if self._layer_began is not None:
            self._layer_seconds.append(time.perf_counter() - self._layer_began)
        self.turns.pause()
        self._layer_began = time.perf_counter()


def _layer_seconds(target_gap_s: float | None) -> float:
    return _LAYER_SECONDS if target_gap_s is None else target_gap_s * _LAYER_SHARE


def _threads() -> tuple[int]:
    """Returns the arguments that give the thread as many threads of torch as this one has."""
    return (torch.get_num_threads(),)
