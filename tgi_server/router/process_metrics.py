"""Metrics of the operating system's processes: the router, and the launcher and shards beside it."""

from collections.abc import Iterator
from contextlib import suppress

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

# The module that a shard runs.
_SHARD = "tgi_server.shard.cli"


class ProcessMetrics(Collector):
    """CPU time, memory and open files of this process, and of the launcher and shards beside it, by `process`.

    Names are as in Prometheus' own client libraries.
    """

    def collect(self) -> Iterator[Metric]:
        cpu = CounterMetricFamily("process_cpu_seconds", "CPU time, user and system.", labels=["process"])
        memory = GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", labels=["process"])
        files = GaugeMetricFamily("process_open_fds", "Open file descriptors.", labels=["process"])
        threads = GaugeMetricFamily("process_threads", "Threads.", labels=["process"])
        for name, process in _processes():
            with suppress(psutil.Error), process.oneshot():  # it may have ended
                times = process.cpu_times()
                cpu.add_metric([name], times.user + times.system)
                memory.add_metric([name], process.memory_info().rss)
                files.add_metric([name], process.num_fds())
                threads.add_metric([name], process.num_threads())
        yield from (cpu, memory, files, threads)


def _processes() -> Iterator[tuple[str, psutil.Process]]:
    """Yields the names and processes of the router and, if a launcher started it, of the launcher and its shards."""
    own = psutil.Process()
    yield "router", own
    with suppress(psutil.Error):
        launcher = own.parent()
        children = [child for child in launcher.children() if _SHARD in child.cmdline()] if launcher else []
        if launcher is None or not children:
            return
        yield "launcher", launcher
        for rank, child in enumerate(sorted(children, key=_started)):
            yield _log_name(child) or f"shard-{rank}", child


def _log_name(process: psutil.Process) -> str:
    """Returns the name that a shard has in the log, where a server has several models."""
    return next((each.partition("=")[2] for each in process.cmdline() if each.startswith("--log-name=")), "")


def _started(process: psutil.Process) -> float:
    return process.create_time()
