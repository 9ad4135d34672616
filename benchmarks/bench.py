"""Runs batches of prompts of equal length through an engine, and says how long its steps take."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import synchronise
from benchmarks.schemas import LONG_TEXTS
from benchmarks.workloads import adapter_name
from tgi_server.contract import Grammar, GrammarKind, StoppingParameters
from tgi_server.engine.driver import Driver
from tgi_server.engine.engine import Engine
from tgi_server.engine.sequence import RunningSequence

_PROFILED_STEPS = 8
# What every sequence of a batch may have: an adapter, all the same one or 8 in turns, or a JSON grammar.
EXTRAS = ("adapter", "adapters", "json")
ADAPTERS = 8


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
        joining = max_batch_size if prefill_tokens is None else min(max_batch_size, max(1, prefill_tokens // context))
        self._prefill_tokens = joining * context
        self._tokens = context + steps + _PROFILED_STEPS + 3
        engine.warm_up(max_batch_size, self._prefill_tokens, self._tokens)
        self._device = torch.device(engine.info.device_type)

    def load_adapters(self, folder: Path) -> None:
        """Loads ADAPTERS adapters as `benchmarks.synthetic` writes them."""
        for name in map(adapter_name, range(ADAPTERS)):
            self._engine.adapters.put(name, self._engine.adapters.fetch(name, folder / name))

    def prefill_seconds(self, batch: int, attempts: int, clock: Callable[[], float] = time.perf_counter) -> float:
        """Computes all prompts of a batch. Returns the median of some attempts, after one that is not counted."""
        times = []
        for _ in range(attempts + 1):
            driver = self._driver(batch)
            synchronise(self._device)
            started = clock()
            _prefill(driver)
            times.append(clock() - started)
        return statistics.median(times[1:])

    def decode_seconds(
        self,
        batch: int,
        extra: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        before: Callable[[], object] = lambda: None,
    ) -> float:
        """Returns the time of a step in which every sequence gets a token, started before the last one's are read.

        extra: of EXTRAS; None: sequences have nothing. before: called between the prompts and the first of the steps;
        there is one step more than is measured.
        """
        driver = self._driver(batch, extra)
        _prefill(driver)
        before()
        times = []
        running = driver.start()
        for _ in range(self._steps):
            started = clock()
            following = driver.start()
            driver.take(running)
            running = following
            times.append(clock() - started)
        driver.take(running)
        return statistics.median(times)

    def profile(self, batch: int) -> None:
        """Prints what the time of a batch's prompts, and then of its decoding steps, goes to."""
        with _profiled(f"prefill of {batch} x {self._context} tokens"):
            driver = self._driver(batch)
            _prefill(driver)
        with _profiled(f"{_PROFILED_STEPS} decoding steps of {batch} sequences"):
            for _ in range(_PROFILED_STEPS):
                driver.step()

    def _driver(self, batch: int, extra: str | None = None) -> Driver:
        """Returns a driver with a batch of random prompts that join in its next steps."""
        driver = Driver(self._engine, max_prefill_tokens=self._prefill_tokens)
        stopping = StoppingParameters(self._tokens - self._context, ignore_eos=True)
        for index in range(batch):
            prompt = Random(index).choices(range(self._engine.info.vocab_size), k=self._context)
            sequence = RunningSequence(index, prompt, stopping)
            if extra == "json":
                sequence.grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(LONG_TEXTS))
                assert self._engine.grammars is not None
                self._engine.grammars.check(sequence.grammar)
            elif extra is not None:
                sequence.adapter_id = adapter_name(index % ADAPTERS if extra == "adapters" else 0)
            driver.add(sequence)
        return driver


def _prefill(driver: Driver) -> None:
    """Computes all prompts; a step is started before the last one's tokens are read."""
    running = driver.start(decode=False)
    while driver.waiting:
        following = driver.start(decode=False)
        driver.take(running)
        running = following
    driver.take(running)


@contextmanager
def _profiled(title: str) -> Iterator[None]:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        yield
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(f"\n{title}\n{profiler.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=48)}")
