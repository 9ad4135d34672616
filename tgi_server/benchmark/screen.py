"""The benchmark on the terminal: what is being measured, its latencies so far, and the cases that are done."""

import asyncio
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, Label, ProgressBar, Sparkline

from tgi_server.benchmark.bench import Result, ShardBench
from tgi_server.benchmark.report import COLUMNS, PERCENTILES, cells, describe, percentiles

# The screen is drawn in this time before the next run is measured, which would wait for it otherwise.
DRAW_SECONDS = 0.05

# Steps that a chart shows.
LONGEST_CHART = 200


class Latency(Vertical):
    """One kind of step: its percentiles, its throughput, and a chart of the last times."""

    DEFAULT_CSS = "Latency { border: round $primary; padding: 0 1; height: 9; } Sparkline { height: 3; margin: 1 0; }"

    def __init__(self, kind: str) -> None:
        super().__init__(id=kind)
        self.border_title = kind

    def compose(self) -> ComposeResult:
        yield Label("-")
        yield Sparkline([], summary_function=max)
        yield Label("-", classes="throughput")

    def show(self, seconds: list[float], throughput: float) -> None:
        values = zip(PERCENTILES, percentiles(seconds), strict=True)
        self.query_one(Label).update("   ".join(f"p{rank} {value:.2f} ms" for rank, value in values))
        self.query_one(Sparkline).data = [1e3 * each for each in seconds[-LONGEST_CHART:]]
        self.query_one(".throughput", Label).update(f"{throughput:.0f} tokens/s")


class BenchmarkApp(App[None]):
    """Shows `bench` at work. Ends with it, or when the user wants it to; `results` then has what was measured."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "#model, #case { padding: 0 1; } ProgressBar { padding: 0 1; } #charts { height: 9; } Latency { width: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [("q,escape,ctrl+c", "quit", "Stop, and show what has been measured")]

    def __init__(self, bench: ShardBench, runs: int) -> None:
        """runs: number of runs of each case, with warm-ups."""
        super().__init__()
        self.results: list[Result] = []
        self.title = describe(bench.info)
        self._bench = bench
        self._runs = runs * len(bench.cases)

    def compose(self) -> ComposeResult:
        yield Label(self.title, id="model", markup=False)
        yield Label("", id="case", markup=False)
        yield ProgressBar(self._runs, show_eta=False)
        with Horizontal(id="charts"):
            yield Latency("prefill")
            yield Latency("decode")
        yield DataTable(cursor_type="none", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).add_columns(*COLUMNS)
        self.run_worker(self._measure())

    async def _measure(self) -> None:
        async for result in self._bench.results():
            if not self.results or self.results[-1] is not result:
                self.results.append(result)
            self._show(result)
            await asyncio.sleep(DRAW_SECONDS)
        self.exit()

    def _show(self, result: Result) -> None:
        self.query_one("#case", Label).update(
            f"{result.case}: run {result.runs}{f', {result.error}' if result.error else ''}"
        )
        self.query_one(ProgressBar).advance()
        self.query_one("#prefill", Latency).show(result.prefill, result.prefill_throughput)
        self.query_one("#decode", Latency).show(result.decode, result.decode_throughput)
        done = self.query_one(DataTable)
        key = str(result.case)
        if key in done.rows:
            done.remove_row(key)
        done.add_row(*cells(result), key=key)
