"""Timing of work on a device."""

import time
from collections.abc import Callable

import torch


def timed(work: Callable[[], object], device: torch.device, attempts: int = 5) -> list[float]:
    """Seconds of each of several runs, after one that does not count."""
    times = []
    for _ in range(attempts + 1):
        synchronise(device)
        started = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - started)
    return times[1:]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
