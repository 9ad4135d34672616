"""Percentiles, numbers and tables."""

import pytest

from benchmarks.load import MeasuredRequest, WorkloadResult
from benchmarks.report import COLUMNS, number, percentile, row, summarise, table
from benchmarks.workloads import Workload


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (99, 99), (100, 100), (1, 1)])
def test_percentile_is_a_value_that_was_measured(percent: float, expected: int) -> None:
    assert percentile(range(100, 0, -1), percent) == expected


def test_percentile_of_one_value_and_of_none() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 50) is None


def test_numbers_keep_three_digits() -> None:
    assert [number(value) for value in (1234.5, 99.94, 9.876, 0.1234, None)] == ["1234", "99.9", "9.88", "0.123", "-"]


def test_table_lines_up() -> None:
    lines = table(("a", "long name"), [["1", "2"], ["333", "4"]]).splitlines()
    assert lines == ["|   a | long name |", "| --: | --------: |", "|   1 |         2 |", "| 333 |         4 |"]


def test_summary_of_a_workload() -> None:
    workload = Workload("X", users=1, words=2, new_tokens=3, repeat=2)
    records = [
        MeasuredRequest(latency=0.5, first_token=0.1, gaps=[0.2, 0.2], new_tokens=3, prompt_tokens=4),
        MeasuredRequest(latency=0.7, first_token=0.3, gaps=[0.4], new_tokens=2, prompt_tokens=4),
    ]
    summary = summarise(WorkloadResult(workload, records, ["refused"], seconds=2.0, cpu_seconds=0.1))
    assert (summary.requests, summary.failures, summary.short_replies) == (2, 1, 1)
    assert (summary.requests_per_s, summary.tokens_per_s) == (1.0, 2.5)
    assert (summary.latency_p50, summary.latency_p99) == (0.5, 0.7)
    assert (summary.first_token_p50_ms, summary.gap_p50_ms, summary.gap_p99_ms) == (100, 200, 400)
    assert (summary.prompt_tokens, summary.new_tokens, summary.client_cpu) == (8, 5, 0.05)
    assert len(row(summary)) == len(COLUMNS)
