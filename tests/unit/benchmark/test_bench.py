"""Batches on simulated shards, which refuse whatever the protocol does not allow."""

import pytest

from shared.settings import read_settings
from tests.fakes.simulated_shard import RunningShards, SimulatedShard, running_shards
from tgi_server import demo_model
from tgi_server.benchmark.bench import Case, Result, ShardBench
from tgi_server.benchmark.settings import BenchmarkSettings
from tgi_server.router.errors import StartupError


def settings(*flags: str) -> BenchmarkSettings:
    return read_settings(BenchmarkSettings, "benchmark", flags)


async def measured(running: RunningShards, *flags: str) -> list[Result]:
    bench = await ShardBench.connect(running.path, settings(*flags))
    results: list[Result] = []
    try:
        async for result in bench.results():
            if not results or results[-1] is not result:
                results.append(result)
    finally:
        await bench.close()
    return results


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("prefill_tokens", [5, 4096])
@pytest.mark.parametrize("shards", [1, 2])
async def test_every_case_is_measured(shards: int, paged: bool, prefill_tokens: int, monkeypatch) -> None:
    monkeypatch.setattr("tgi_server.benchmark.bench.PREFILL_TOKENS", prefill_tokens)
    flags = ("-b", "1", "-b", "3", "--sequence-length", "7,12", "-d", "1", "-d", "5", "--runs", "2", "--warmups", "1")
    async with running_shards(*(SimulatedShard(64, 4, paged=paged) for _ in range(shards))) as running:
        results = await measured(running, *flags)
        assert [result.case for result in results] == [
            Case(size, prompt, new) for size in (1, 3) for prompt in (7, 12) for new in (1, 5)
        ]
        for result in results:
            assert result.error == ""
            assert (result.runs, len(result.prefill)) == (2, 2)
            assert len(result.decode) == 2 * (result.case.decode_length - 1)
            assert result.decoded_tokens == len(result.decode) * result.case.batch_size
            assert all(seconds > 0 for seconds in (*result.prefill, *result.decode))
            assert result.prefill_throughput > 0
        for service in running.services:
            assert not service.shard.rows
            assert service.shard.largest_step <= (prefill_tokens if paged else max(prefill_tokens, 12))


async def test_a_server_that_is_warmed_up_stays_as_it_is() -> None:
    async with running_shards(SimulatedShard(64, 4)) as running:
        await measured(running, "-b", "4", "--runs", "1")
        assert running.services[0].warmups[0]["limits"].max_batch_size == 4
        with pytest.raises(StartupError, match="a batch of 5, 10 \\+ 8 tokens is more than the 4 sequences"):
            await measured(running, "-b", "5")
        assert len(running.services[0].warmups) == 1


async def test_usual_batch_sizes_are_left_out_where_they_do_not_fit() -> None:
    async with running_shards(SimulatedShard(24, 4)) as running:
        assert [result.case.batch_size for result in await measured(running, "--runs", "1")] == [1, 2, 4]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("-b", "5"), "a batch of 5, 10 \\+ 8 tokens is more than the KV cache has room for: 96 tokens"),
        (("-s", "96"), "a batch of 1, 96 \\+ 8 tokens is more than the 96 tokens that a sequence may have"),
        (("-t", "/absent/model"), "--tokenizer-name: the tokenizer of /absent/model cannot be loaded"),
        (("-t", str(demo_model.PATH)), "is not that of simulated, which has 24 tokens"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_runs(flags: tuple[str, ...], complaint: str) -> None:
    async with running_shards(SimulatedShard(24, 4)) as running:
        with pytest.raises(StartupError, match=complaint):
            await measured(running, *flags)
        assert running.services[0].calls == []


async def test_a_case_that_fails_is_named_and_the_next_one_measured() -> None:
    async with running_shards(SimulatedShard(64, 4)) as running:
        bench = await ShardBench.connect(running.path, settings("-b", "1,2", "--runs", "1", "--warmups", "0"))
        results = []
        running.services[0].failing = RuntimeError("out of memory")
        async for result in bench.results():
            results.append(result)
            running.services[0].failing = None
        await bench.close()
    assert [(result.runs, result.error) for result in results] == [(0, "shard 0 failed: out of memory"), (1, "")]


def test_sampling_is_what_the_flags_say() -> None:
    assert not settings().sampling().do_sample
    assert settings("--top-k", "5").sampling().do_sample
    assert settings("--do-sample").sampling().do_sample
    chosen = settings("--temperature=0.5", "--top-p=0.9", "--repetition-penalty=1.2", "--watermark").sampling()
    assert (chosen.temperature, chosen.top_p, chosen.repetition_penalty, chosen.watermark) == (0.5, 0.9, 1.2, True)
