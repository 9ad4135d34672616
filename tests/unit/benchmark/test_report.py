"""Results as tables, lines and files."""

import csv
import json
from pathlib import Path

import pytest

from shared.stubs import generate_pb2 as pb
from tgi_server.benchmark.bench import Case, Result
from tgi_server.benchmark.report import COLUMNS, line, percentiles, table, write

INFO = pb.InfoResponse(model_id="llama", dtype="float32", device_type="cpu", world_size=1)
DONE = Result(Case(2, 10, 3), 2, prefill=[0.01, 0.03], decode=[0.002] * 4, decoded_tokens=8)
FAILED = Result(Case(4, 10, 3), error="out of memory")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([], [0, 0, 0]),
        ([0.002], [2, 2, 2]),
        ([0.001, 0.003], [2, 2.8, 2.98]),
        ([place / 1000 for place in range(101)], [50, 90, 99]),
    ],
)
def test_percentiles(seconds: list[float], expected: list[float]) -> None:
    assert percentiles(seconds) == pytest.approx(expected)


def test_a_table_has_a_row_for_each_case_and_a_line_for_each_error() -> None:
    head, rule, row, _, error = table([DONE, FAILED]).splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == list(COLUMNS)
    assert set(rule) == set("|-:")
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("2", "10", "3", "20.00", "28.00", "29.80", "1000", "2.00", "2.00", "2.00", "1000")
    ]
    assert error == "batch of 4, 10 + 3 tokens: out of memory"


def test_a_line_for_logs() -> None:
    assert line(DONE) == (
        "batch of 2, 10 + 3 tokens: prefill p50 20.00, p90 28.00, p99 29.80 ms, 1000 tokens/s; "
        "decode p50 2.00, p90 2.00, p99 2.00 ms, 1000 tokens/s"
    )


def test_files(tmp_path: Path) -> None:
    write(tmp_path / "results.json", INFO, [DONE, FAILED])
    content = json.loads((tmp_path / "results.json").read_text())
    assert (content["model_id"], content["dtype"]) == ("llama", "float32")
    done, failed = content["cases"]
    assert (done["batch_size"], done["prefill_seconds"], done["error"]) == (2, [0.01, 0.03], None)
    assert failed["error"] == "out of memory"
    write(tmp_path / "results.csv", INFO, [DONE, FAILED])
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["error"] for row in rows] == ["", "out of memory"]
    assert float(rows[0]["prefill p90, ms"]) == pytest.approx(28)
