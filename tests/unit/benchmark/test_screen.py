"""The screen, driven by textual's pilot."""

from textual.widgets import DataTable, Label, ProgressBar, Sparkline

from shared.settings import read_settings
from tests.fakes.simulated_shard import SimulatedShard, running_shards
from tgi_server.benchmark.bench import ShardBench
from tgi_server.benchmark.screen import BenchmarkApp
from tgi_server.benchmark.settings import BenchmarkSettings


def settings(*flags: str) -> BenchmarkSettings:
    return read_settings(BenchmarkSettings, "benchmark", flags)


async def test_the_screen_shows_what_is_measured_and_ends_with_it() -> None:
    async with running_shards(SimulatedShard(64, 4)) as running:
        bench = await ShardBench.connect(running.path, settings("-b", "1", "-b", "2", "--runs", "2"))
        app = BenchmarkApp(bench, runs=3)
        async with app.run_test(size=(120, 40)) as pilot:
            while len(app.results) < 2 or not app.results[1].runs:
                await pilot.pause(0.02)
            assert len(app.query_one(DataTable).rows) == 2
            assert "simulated" in str(app.query_one("#model", Label).content)
            assert "p99" in str(app.query_one("#prefill Label", Label).content)
            assert app.query_one("#decode Sparkline", Sparkline).data
            assert app.query_one(ProgressBar).total == 6
            await app.workers.wait_for_complete()
        await bench.close()
    assert [(result.case.batch_size, result.runs) for result in app.results] == [(1, 2), (2, 2)]


async def test_q_ends_it_with_what_has_been_measured() -> None:
    async with running_shards(SimulatedShard(64, 4), step_seconds=0.01) as running:
        bench = await ShardBench.connect(running.path, settings("-b", "1", "--runs", "1000", "--warmups", "0"))
        app = BenchmarkApp(bench, runs=1000)
        async with app.run_test(size=(120, 40)) as pilot:
            while not app.results:
                await pilot.pause(0.02)
            await pilot.press("q")
        await bench.close()
    assert 0 < app.results[0].runs < 1000


async def test_an_error_is_shown_as_it_is() -> None:
    async with running_shards(SimulatedShard(64, 4)) as running:
        bench = await ShardBench.connect(running.path, settings("-b", "1", "--runs", "1", "--warmups", "0"))
        app = BenchmarkApp(bench, runs=1)
        running.services[0].failing = RuntimeError("out of memory [/red")
        async with app.run_test(size=(120, 40)) as pilot:
            while not app.results:
                await pilot.pause(0.02)
            assert "out of memory [/red" in str(app.query_one("#case", Label).content)
        await bench.close()
    assert app.results[0].error.endswith("out of memory [/red")
