"""Results as people and programs read them: a line, a table, JSON, CSV."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import quantiles

from shared.stubs import generate_pb2 as pb
from tgi_server.benchmark.bench import Result

PERCENTILES = (50, 90, 99)

COLUMNS = (
    *("batch", "prompt", "new"),
    *(f"prefill p{rank}, ms" for rank in PERCENTILES),
    "prefill, tokens/s",
    *(f"decode p{rank}, ms" for rank in PERCENTILES),
    "decode, tokens/s",
)


def percentiles(seconds: Sequence[float]) -> list[float]:
    """Returns the milliseconds that half, nine tenths, and 99 of 100 do not exceed; nothing was measured: zeros."""
    if len(seconds) < 2:
        return [1e3 * sum(seconds)] * len(PERCENTILES)
    cuts = quantiles(seconds, n=100, method="inclusive")
    return [1e3 * cuts[rank - 1] for rank in PERCENTILES]


def row(result: Result) -> list[float]:
    """Returns the numbers of one case, in the order of COLUMNS."""
    case = result.case
    return [
        *(case.batch_size, case.sequence_length, case.decode_length),
        *(*percentiles(result.prefill), result.prefill_throughput),
        *(*percentiles(result.decode), result.decode_throughput),
    ]


def cells(result: Result) -> list[str]:
    """Returns the numbers of one case as they are shown."""
    sizes, measured = row(result)[:3], row(result)[3:]
    return [*(str(size) for size in sizes), *(f"{number:.{2 if number < 100 else 0}f}" for number in measured)]


def line(result: Result) -> str:
    """Returns one line about a case, for logs."""
    if result.error:
        return f"{result.case}: {result.error}"
    prefill, decode = (
        ", ".join(f"p{rank} {value:.2f}" for rank, value in zip(PERCENTILES, percentiles(seconds), strict=True))
        for seconds in (result.prefill, result.decode)
    )
    return (
        f"{result.case}: prefill {prefill} ms, {result.prefill_throughput:.0f} tokens/s; "
        f"decode {decode} ms, {result.decode_throughput:.0f} tokens/s"
    )


def describe(info: pb.InfoResponse) -> str:
    """Returns one line about what is measured."""
    shards = f", {info.world_size} shards" if info.world_size > 1 else ""
    return f"{info.model_id}, {info.dtype} on {info.device_type}{shards}"


def table(results: Sequence[Result]) -> str:
    """Returns a table in Markdown, and below it the errors."""
    rows = [COLUMNS, *(cells(result) for result in results if result.runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join([*lines, *(f"\n{result.case}: {result.error}" for result in results if result.error)])


def write(path: Path, info: pb.InfoResponse, results: Sequence[Result]) -> None:
    """Writes the results as JSON, with each time that was measured, or as CSV. Raises OSError."""
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.writer(file)
            writer.writerow((*COLUMNS, "error"))
            writer.writerows([*row(result), result.error] for result in results)
            return
        cases = [{**asdict(result.case), **_times(result)} for result in results]
        names = ("model_id", "revision", "dtype", "device_type", "world_size")
        json.dump({**{name: getattr(info, name) for name in names}, "cases": cases}, file, indent=1)


def _times(result: Result) -> dict[str, object]:
    return {
        "runs": result.runs,
        "prefill_seconds": result.prefill,
        "decode_seconds": result.decode,
        "prefill_tokens_per_second": result.prefill_throughput,
        "decode_tokens_per_second": result.decode_throughput,
        "error": result.error or None,
    }
