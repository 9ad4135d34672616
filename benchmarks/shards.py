"""Runs the steps of `benchmarks.engine` on a model that is split over several processes, gloo or NCCL between them."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from benchmarks.bench import Bench
from benchmarks.report import number
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.engine import Engine
from tgi_server.engine.sharding import ShardGroup, Timing, connect
from tgi_server.launcher.preflight import free_port

COLUMNS = ("step", "batch", "tokens/s", "engine, ms", "1 shard, ms", "x 1 shard", "collectives, ms", "collectives")
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class ShardedMeasurement:
    """One kind of step, as shard 0 saw it; seconds. collectives: what it spent in them; calls: how many they were."""

    step: str
    batch: int
    tokens: int
    engine: float
    collectives: float
    calls: float

    def row(self, alone: float) -> list[str]:
        """alone: seconds that the step takes when the model is not split."""
        speed, ratio = number(self.tokens / self.engine), number(self.engine / alone)
        times = [number(seconds * 1e3) for seconds in (self.engine, alone)]
        return [self.step, str(self.batch), speed, *times, ratio, number(self.collectives * 1e3), number(self.calls)]


@dataclass(frozen=True, slots=True)
class Job:
    """What every shard runs. threads: of each; None: its part of the cores."""

    config: EngineConfig
    batches: Sequence[int]
    context: int
    steps: int
    threads: int | None


def measure_shards(job: Job, count: int) -> list[ShardedMeasurement]:
    """Starts the shards and waits for shard 0's measurements. Raises RuntimeError when a shard fails."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    port = free_port()
    processes = [
        context.Process(target=_shard, args=(job, rank, count, port, sending if rank == 0 else None), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError as error:
        raise RuntimeError("a shard ended before it had measured anything") from error
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()


def _shard(job: Job, rank: int, count: int, port: int, answer: Connection | None) -> None:
    device = torch.device("cuda", rank) if job.config.resolve_device().type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = connect(rank, count, "localhost", port, device=device)
    if job.threads:
        torch.set_num_threads(job.threads)
    config = EngineConfig(job.config.model_path, dtype=job.config.dtype, device=device, group=group)
    engine = Engine(config)
    bench = Bench(engine, job.context, job.steps, max(job.batches))
    measurements = [item for batch in job.batches for item in _measure(bench, group, job, batch)]
    group.ask("done")
    if answer is not None:
        answer.send(measurements)


def _measure(bench: Bench, group: ShardGroup, job: Job, batch: int) -> list[ShardedMeasurement]:
    timing = group.timing = Timing()
    seconds = bench.prefill_seconds(batch, ATTEMPTS)
    passes = ATTEMPTS + 1
    tokens = batch * job.context
    prefill = ShardedMeasurement("prefill", batch, tokens, seconds, timing.seconds / passes, timing.calls / passes)
    timing = group.timing = Timing()
    seconds = bench.decode_seconds(batch)
    steps = job.steps + 1
    spent = (timing.seconds - prefill.collectives) / steps  # it starts with a prefill
    calls = (timing.calls - prefill.calls) / steps
    return [prefill, ShardedMeasurement("decode", batch, batch, seconds, spent, calls)]
