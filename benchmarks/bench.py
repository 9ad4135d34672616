"""Runs batches of prompts of equal length through an engine, and says how long its steps take."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import synchronise
from tgi_server.contract import Grammar, GrammarType, StoppingParameters
from tgi_server.engine.engine import Engine
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.sequence import RunningSequence

_BATCH_ID = 1
_PROFILED_STEPS = 8
_WORDS = Grammar(GrammarType.REGEX, "([a-z]+ )+[0-9]{500}")  # without an end in sight, and with many choices


class Bench:
    """Runs batches of random prompts of equal length through an engine."""

    def __init__(self, engine: Engine, context: int, steps: int, max_batch_size: int) -> None:
        """context: tokens of each prompt. steps: decoding steps that are measured."""
        self._engine = engine
        self._context = context
        self._steps = steps
        total = context + steps + _PROFILED_STEPS + 3
        self._capacity: CacheCapacity = engine.warm_up(max_batch_size, max_batch_size * context, total)
        self._tokens = total
        self._device = torch.device(engine.info.device_type)

    def prefill_seconds(self, batch: int, attempts: int) -> float:
        """One step that computes all prompts of a batch; the median of some attempts, after one that is not counted."""
        return statistics.median([self._prefill(batch) for _ in range(attempts + 1)][1:])

    def decode_seconds(self, batch: int, grammars: int = 0) -> float:
        """A step in which every sequence gets a token; the next one is started before the last one's are read.

        grammars: sequences that have one.
        """
        self._prefill(batch, grammars)
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

    def _prefill(self, batch: int, grammars: int = 0) -> float:
        self._engine.clear()
        sequences = [self._sequence(index, _WORDS if index < grammars else None) for index in range(batch)]
        chunks = [(sequence.request_id, self._context) for sequence in sequences]
        synchronise(self._device)
        started = time.perf_counter()
        self._engine.step(_BATCH_ID, sequences, chunks).collect()
        return time.perf_counter() - started

    def _sequence(self, index: int, grammar: Grammar | None) -> RunningSequence:
        vocabulary = range(self._engine.info.vocab_size)
        prompt = Random(index).choices(vocabulary, k=self._context)
        blocks: list[int] = []
        if self._engine.info.paged:
            count = -(-self._tokens // self._capacity.block_size)
            blocks = list(range(1 + index * count, 1 + (index + 1) * count))
        stopping = StoppingParameters(self._tokens, ignore_eos=True)
        return RunningSequence(index, prompt, stopping, blocks=blocks, grammar=grammar)


@contextmanager
def _profiled(title: str) -> Iterator[None]:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        yield
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(f"\n{title}\n{profiler.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=48)}")
