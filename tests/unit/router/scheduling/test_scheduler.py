"""The scheduler's task against simulated shards over real gRPC."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from shared.stubs import generate_pb2 as pb
from tests.fakes.recording_sink import RecordingSink, recorded_request
from tests.fakes.simulated_shard import RunningShards, SimulatedShard, expected_tokens, running_shards
from tests.fakes.simulation import FixedPace, batch_limits
from tgi_server.contract import FinishReason, SamplingParameters
from tgi_server.router.errors import GenerationFailed, InvalidRequest
from tgi_server.router.metrics import Metrics
from tgi_server.router.scheduling.scheduler import Scheduler
from tgi_server.router.scheduling.shard_client import ShardedClient
from tgi_server.router.submission import PreparedRequest


@dataclass(slots=True)
class House:
    """A scheduler, the shards that it drives, and its metrics."""

    scheduler: Scheduler
    shards: RunningShards
    metrics: Metrics
    ids: Any = field(default_factory=lambda: count(1))

    def submit(
        self, input_ids: list[int], max_new_tokens: int = 8, **parameters: Any
    ) -> tuple[PreparedRequest, RecordingSink, asyncio.Event]:
        ended = asyncio.Event()
        request, sink = recorded_request(next(self.ids), input_ids, max_new_tokens, on_end=ended.set, **parameters)
        self.scheduler.submit(request, sink)
        return request, sink, ended

    async def until(self, condition: Callable[[], bool], seconds: float = 15.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # what is waited for has no event
                await asyncio.sleep(0.002)

    def metric(self, series: str) -> float:
        lines = self.metrics.expose().decode().splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{series} "))


@asynccontextmanager
async def house(
    *shards: SimulatedShard,
    step_seconds: float = 0.0,
    call_timeout_s: float = 20.0,
    max_batch_prefill_tokens: int = 64,
    max_batch_size: int = 256,
) -> AsyncIterator[House]:
    shards = shards or (SimulatedShard(64, 4),)
    async with running_shards(*shards, step_seconds=step_seconds) as running:
        client = await ShardedClient.connect(running.path, call_timeout_s=call_timeout_s)
        info, capacity = await client.info(), await client.warmup(pb.WarmupRequest())
        metrics = Metrics()
        scheduler = Scheduler(
            client,
            info,
            capacity,
            batch_limits(
                max_batch_total_tokens=capacity.max_batch_total_tokens,
                max_batch_prefill_tokens=max_batch_prefill_tokens,
                max_batch_size=max_batch_size,
            ),
            metrics,
            FixedPace(8),
            idle_check_after_s=0.01,
            recovery_timeout_s=1.0,
            recovery_interval_s=0.05,
        )
        scheduler.start()
        try:
            yield House(scheduler, running, metrics)
        finally:
            await scheduler.stop()
            await client.close()


@pytest.mark.parametrize("shards", [1, 2])
async def test_many_clients_at_once_get_their_tokens(shards: int) -> None:
    rng = random.Random(shards)
    async with house(*(SimulatedShard(24, 4) for _ in range(shards))) as there:
        submitted = []
        for _ in range(60):
            prompt = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 30))]
            stop_after = rng.choice((None, None, 3))
            submitted.append(
                (
                    *there.submit(prompt, rng.randrange(1, 25), stop_after=stop_after, ignore_eos=rng.random() < 0.7),
                    stop_after,
                )
            )
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() / 50)
        await asyncio.wait_for(asyncio.gather(*(ended.wait() for _, _, ended, _ in submitted)), 60)
        for request, sink, _, stop_after in submitted:
            assert sink.tokens == expected_tokens(request, stop_after=stop_after)
        await there.until(lambda: there.metric("tgi_batch_current_max_tokens") == 0)
        there.scheduler.batch.check()
        assert there.scheduler.healthy
        assert there.metric("tgi_prefix_cache_hit_tokens_total") > 0
        assert "clear_cache" not in there.shards.services[0].calls


async def test_a_preempted_request_goes_on_unnoticed() -> None:
    async with house(SimulatedShard(8, 4)) as there:
        submitted = [there.submit([token] * 4, 24) for token in (1, 2)]
        await asyncio.wait_for(asyncio.gather(*(ended.wait() for _, _, ended in submitted)), 10)
        for request, sink, _ in submitted:
            assert (sink.tokens, sink.starts) == (expected_tokens(request), 1)
        assert there.metric("tgi_batch_preemption_count_total") >= 1


async def test_metrics_tell_what_runs_and_what_waits() -> None:
    async with house(step_seconds=0.01, max_batch_size=2) as there:
        for token in (1, 2, 3):
            there.submit([token] * 6, 1000 // 20)
        await there.until(lambda: there.metric("tgi_batch_current_size") == 2)
        assert there.metric("tgi_queue_size") == 1
        assert there.metric("tgi_batch_current_max_tokens") >= 12
        assert (there.metric("vllm:num_requests_waiting"), there.metric("vllm:num_requests_running")) == (1, 2)
        assert there.metric("vllm:kv_cache_usage_perc") >= 12 / 256
        assert there.metric('vllm:cache_config_info{block_size="4",num_gpu_blocks="64"}') == 1
        assert there.metric('tgi_batch_inference_count{method="prefill"}') == 1
        await there.until(lambda: there.metric('tgi_batch_inference_success{method="decode"}') > 2)
        assert there.metric('tgi_batch_inference_duration_sum{method="decode"}') > 0


async def test_metrics_tell_of_a_request_that_waits_before_the_shards_answer() -> None:
    async with house(max_batch_size=1) as there:
        there.shards.services[0].hanging = True
        there.submit([1, 2, 3])
        await there.until(lambda: there.metric("tgi_batch_current_size") == 1)
        waiting, _, _ = there.submit([4, 5, 6])
        assert there.metric("tgi_queue_size") == 1
        there.scheduler.cancel(waiting.id)
        assert there.metric("tgi_queue_size") == 0
        there.shards.services[0].hanging = False


async def test_a_cancelled_request_leaves_the_batch_within_a_step() -> None:
    async with house(step_seconds=0.02) as there:
        request, sink, _ = there.submit([1, 2, 3], 100)
        _, other, _ = there.submit([4, 5, 6], 100)
        await there.until(lambda: len(sink.tokens) >= 3)
        there.scheduler.cancel(request.id)
        assert there.metric("tgi_batch_current_size") == 1
        tokens, steps = len(sink.tokens), len(other.tokens)
        shard = there.shards.services[0].shard
        await there.until(lambda: request.id not in shard.rows)
        assert len(other.tokens) - steps <= 3  # two were on their way already
        await there.until(lambda: len(other.tokens) > steps + 4)
        assert len(sink.tokens) == tokens
        assert not sink.ended


async def test_a_request_cancelled_while_it_waits_is_never_started() -> None:
    async with house(step_seconds=0.01, max_batch_size=1) as there:
        _, _, ended = there.submit([1, 2, 3], 10)
        waiting, sink, _ = there.submit([1, 2, 3], 10)
        await there.until(lambda: there.metric("tgi_queue_size") == 1)
        there.scheduler.cancel(waiting.id)
        await asyncio.wait_for(ended.wait(), 10)
        await there.until(lambda: there.metric("tgi_queue_size") == 0)
        assert (sink.starts, sink.ended) == (0, False)


async def test_a_failed_batch_fails_its_requests_and_the_server_goes_on() -> None:
    async with house(step_seconds=0.005, max_batch_size=2) as there:
        service = there.shards.services[0]
        running = [there.submit([1, 2, token], 200) for token in (1, 2)]
        request, waiting, done = there.submit([1, 2, 3], 5)
        await there.until(lambda: all(len(sink.tokens) > 2 for _, sink, _ in running))
        service.failing = RuntimeError("CUDA error")
        await there.until(lambda: all(sink.ended for _, sink, _ in running))
        service.failing = None
        for _, sink, _ in running:
            assert isinstance(sink.error, GenerationFailed)
            assert "CUDA error" in str(sink.error)
        if waiting.error is None:  # it may have been admitted while steps still failed
            await asyncio.wait_for(done.wait(), 10)
            assert waiting.tokens == expected_tokens(request)
        request, sink, done = there.submit([1, 2, 1], 5)
        await asyncio.wait_for(done.wait(), 10)
        assert sink.tokens == expected_tokens(request)
        assert there.scheduler.healthy
        there.scheduler.batch.check()


async def test_an_ill_device_makes_all_requests_fail_until_it_is_well() -> None:
    async with house(step_seconds=0.005) as there:
        service = there.shards.services[0]
        _, sink, _ = there.submit([1, 2, 3], 200)
        await there.until(lambda: len(sink.tokens) > 2)
        service.ill, service.failing = True, RuntimeError("CUDA error")
        await there.until(lambda: not there.scheduler.healthy)
        _, refused, _ = there.submit([1, 2, 3])
        assert isinstance(refused.error, GenerationFailed)
        service.ill, service.failing = False, None
        await there.until(lambda: there.scheduler.healthy)
        request, sink, done = there.submit([1, 2, 3])
        await asyncio.wait_for(done.wait(), 10)
        assert sink.tokens == expected_tokens(request)


async def test_when_the_shard_is_gone_everything_fails_quickly() -> None:
    async with house(step_seconds=0.005, max_batch_size=1) as there:
        _, running, _ = there.submit([1, 2, 3], 200)
        _, waiting, _ = there.submit([1, 2, 3], 200)
        await there.until(lambda: len(running.tokens) > 2)
        await there.shards.servers[0].stop(None)
        await there.until(lambda: running.ended and waiting.ended, seconds=5)
        assert isinstance(running.error, GenerationFailed)
        assert isinstance(waiting.error, GenerationFailed)
        await there.until(lambda: not there.scheduler.healthy)
        _, late, _ = there.submit([1, 2, 3])
        assert isinstance(late.error, GenerationFailed)


async def test_a_shard_that_hangs_fails_the_batch_in_the_end() -> None:
    async with house(call_timeout_s=0.3) as there:
        there.shards.services[0].hanging = True
        _, sink, done = there.submit([1, 2, 3])
        await asyncio.wait_for(done.wait(), 10)
        assert isinstance(sink.error, GenerationFailed)
        there.shards.services[0].hanging = False
        await there.until(lambda: there.scheduler.healthy)
        request, sink, done = there.submit([1, 2, 3])
        await asyncio.wait_for(done.wait(), 10)
        assert sink.tokens == expected_tokens(request)


async def test_one_of_two_shards_fails_while_the_other_hangs() -> None:
    async with house(SimulatedShard(64, 4), SimulatedShard(64, 4), step_seconds=0.005) as there:
        _, sink, done = there.submit([1, 2, 3], 200)
        await there.until(lambda: len(sink.tokens) > 2)
        there.shards.services[0].hanging = True
        there.shards.services[1].failing = RuntimeError("lost")
        await asyncio.wait_for(done.wait(), 10)
        assert "shard 1 failed: lost" in str(sink.error)
        there.shards.services[0].hanging = False
        there.shards.services[1].failing = None
        request, sink, done = there.submit([1, 2, 3])
        await asyncio.wait_for(done.wait(), 10)
        assert sink.tokens == expected_tokens(request)


async def test_a_request_that_can_never_fit_is_refused() -> None:
    async with house() as there:
        _, sink, _ = there.submit([1] * 1200, 100)
        assert isinstance(sink.error, InvalidRequest)
        assert str(sink.error) == "the request needs 1,299 tokens of KV cache; the cache has 256"


@pytest.mark.parametrize(
    "parameters",
    [
        {"sampling": SamplingParameters(top_k=2**32)},
        {"sampling": SamplingParameters(logit_bias={-1: 1.0})},
        {"top_n_tokens": 2**32},
        {"input_ids": [1, 2**32]},
    ],
)
async def test_a_request_that_no_message_can_hold_fails_alone(parameters: dict[str, Any]) -> None:
    async with house(step_seconds=0.005) as there:
        request, sink, ended = there.submit([1, 2, 3], 40)
        await there.until(lambda: len(sink.tokens) > 2)
        _, refused, _ = there.submit(**{"input_ids": [1, 2, 3], **parameters})
        assert isinstance(refused.error, InvalidRequest)
        assert "the shards cannot take" in str(refused.error)
        await asyncio.wait_for(ended.wait(), 10)
        assert sink.tokens == expected_tokens(request)
        assert "clear_cache" not in there.shards.services[0].calls


@pytest.mark.logs_tracebacks
async def test_a_sink_that_asks_a_cancelled_future_fails_alone() -> None:
    def broken(*_: object) -> None:
        raise asyncio.CancelledError

    async with house() as there:
        for method in ("started", "push", "finished", "failed"):
            _, sink, _ = there.submit([1, 2, 3], 8)
            setattr(sink, method, broken)
            request, sound, ended = there.submit([1, 2, 4], 8)
            await asyncio.wait_for(ended.wait(), 10)
            assert sound.tokens == expected_tokens(request)
        assert "clear_cache" not in there.shards.services[0].calls


@pytest.mark.logs_tracebacks
async def test_the_books_are_checked_and_mended_when_nothing_is_left_to_do(caplog: pytest.LogCaptureFixture) -> None:
    async with house() as there:
        there.submit([1, 2, 3, 4], 8)
        there.scheduler.batch.memory._pool.take(1)  # type: ignore[attr-defined]  # a block that nobody gives back
        await there.until(lambda: "it is rebuilt" in caplog.text)
        there.scheduler.batch.check()
        request, sink, ended = there.submit([1, 2, 3, 4], 8)
        await asyncio.wait_for(ended.wait(), 10)
        assert sink.tokens == expected_tokens(request)


async def test_requests_that_come_together_start_together() -> None:
    async with house(max_batch_prefill_tokens=1000) as there:
        await asyncio.sleep(0.01)
        ends = [there.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)[2] for _ in range(10)]
        await asyncio.wait_for(asyncio.gather(*(ended.wait() for ended in ends)), 10)
        assert there.shards.services[0].calls == ["prefill"] + ["decode"] * 3


async def test_the_next_step_is_sent_before_the_last_one_is_answered() -> None:
    async with house(step_seconds=0.05) as there:
        _, sink, _ = there.submit([1, 2, 3], 100)
        await there.until(lambda: len(sink.tokens) == 2)
        service = there.shards.services[0]
        service.step_seconds = 2.0
        # While step 3 and the one after it compute, nothing has come back: both must have been sent.
        await there.until(lambda: there.metric('tgi_batch_inference_count{method="decode"}') >= 3)
        assert len(sink.tokens) == 2


@pytest.mark.parametrize("shards", [1, 2])
async def test_stopping_fails_what_has_not_ended(shards: int) -> None:
    simulated = [SimulatedShard(64, 4) for _ in range(shards)]
    async with house(*simulated, step_seconds=0.05, max_batch_size=1) as there:
        sinks = [there.submit([1, 2, 3], 100)[1] for _ in range(2)]
        await there.until(lambda: len(sinks[0].tokens) > 1)
        await asyncio.wait_for(there.scheduler.stop(), 5)
        assert all(isinstance(sink.error, GenerationFailed) for sink in sinks)
        late, sink = recorded_request(99, [1])
        there.scheduler.submit(late, sink)
        assert sink.error is not None


@pytest.mark.parametrize("turns", range(5))
async def test_stopping_just_after_a_request_came_stops(turns: int) -> None:
    """A cancellation is not lost in any turn of the event loop between the request and the step for it."""
    async with house() as there:
        for _ in range(3):
            await asyncio.sleep(0)  # until the task sleeps
        _, sink, _ = there.submit([1, 2, 3], 100)
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(there.scheduler.stop(), 5)
        assert isinstance(sink.error, GenerationFailed)


async def test_padded_models_are_served() -> None:
    async with house(SimulatedShard(64, 4, paged=False)) as there:
        submitted = [there.submit([1 + token] * (3 + token), 6) for token in range(8)]
        await asyncio.wait_for(asyncio.gather(*(ended.wait() for _, _, ended in submitted)), 10)
        for request, sink, _ in submitted:
            assert sink.tokens == expected_tokens(request)
            assert sink.reason is FinishReason.LENGTH
