"""Runs batches of prompts of equal length through an engine, and says how long its steps take."""

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import synchronise
from tgi_server.contract import StoppingParameters
from tgi_server.engine.engine import Engine, Step
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.sequence import RunningSequence

_BATCH_ID = 1
_PROFILED_STEPS = 8


class Bench:
    """Runs batches of random prompts of equal length through an engine."""

    def __init__(
        self, engine: Engine, context: int, steps: int, max_batch_size: int, prefill_tokens: int | None = None
    ) -> None:
        """context: tokens of each prompt. steps: decoding steps that are measured.

        prefill_tokens: prompt tokens of one step; None: all prompts are computed in one.
        """
        self._engine = engine
        self._context = context
        self._steps = steps
        self._joining = max_batch_size if prefill_tokens is None else max(1, prefill_tokens // context)
        self._tokens = context + steps + _PROFILED_STEPS + 3
        joining = min(self._joining, max_batch_size)
        self._capacity: CacheCapacity = engine.warm_up(max_batch_size, joining * context, self._tokens)
        self._device = torch.device(engine.info.device_type)

    def prefill_seconds(self, batch: int, attempts: int) -> float:
        """Computes all prompts of a batch. Returns the median of some attempts, after one that is not counted."""
        return statistics.median([self._prefill(batch) for _ in range(attempts + 1)][1:])

    def decode_seconds(self, batch: int) -> float:
        """Returns the time of a step in which every sequence gets a token, started before the last one's are read."""
        self._prefill(batch)
        times = []
        running = self._engine.step(_BATCH_ID)
        for _ in range(self._steps):
            started = time.perf_counter()
            following = self._engine.step(_BATCH_ID)
            running.collect()
            running = following
            times.append(time.perf_counter() - started)
        running.collect()
        return statistics.median(times)

    def profile(self, batch: int) -> None:
        """Prints what the time of a batch's prompts, and then of its decoding steps, goes to."""
        with _profiled(f"prefill of {batch} x {self._context} tokens"):
            self._prefill(batch)
        with _profiled(f"{_PROFILED_STEPS} decoding steps of {batch} sequences"):
            for _ in range(_PROFILED_STEPS):
                self._engine.step(_BATCH_ID).collect()

    def _prefill(self, batch: int) -> float:
        self._engine.clear()
        sequences = [self._sequence(index) for index in range(batch)]
        synchronise(self._device)
        started = time.perf_counter()
        running: deque[Step] = deque()
        for first in range(0, batch, self._joining):
            joining = sequences[first : first + self._joining]
            chunks = [(sequence.request_id, self._context) for sequence in joining]
            running.append(self._engine.step(_BATCH_ID, joining, chunks, decode=False))
            if len(running) > 1:
                running.popleft().collect()
        running.popleft().collect()
        return time.perf_counter() - started

    def _sequence(self, index: int) -> RunningSequence:
        prompt = Random(index).choices(range(self._engine.info.vocab_size), k=self._context)
        blocks: list[int] = []
        if self._engine.info.paged:
            count = -(-self._tokens // self._capacity.block_size)
            blocks = list(range(1 + index * count, 1 + (index + 1) * count))
        return RunningSequence(index, prompt, StoppingParameters(self._tokens, ignore_eos=True), blocks=blocks)


@contextmanager
def _profiled(title: str) -> Iterator[None]:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        yield
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(f"\n{title}\n{profiler.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=48)}")
