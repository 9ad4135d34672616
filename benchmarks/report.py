"""Numbers from measurements, tables from numbers, and how a command ends."""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path

from benchmarks.load import WorkloadResult


@dataclass(frozen=True, slots=True)
class Summary:
    """A workload's numbers; None where there is nothing to tell. Latencies in seconds, _ms in milliseconds.

    first_token: from sending a request to its first token. gap: between two tokens of a stream.
    client_cpu: of the load generator, as a share of one core.
    """

    workload: str
    requests: int
    failures: int
    short_replies: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens: int | None
    new_tokens: int
    latency_p50: float | None
    latency_p99: float | None
    first_token_p50_ms: float | None
    first_token_p99_ms: float | None
    gap_p50_ms: float | None
    gap_p99_ms: float | None
    client_cpu: float


def summarise(outcome: WorkloadResult) -> Summary:
    records, workload = outcome.records, outcome.workload
    latencies = [record.latency for record in records]
    first_tokens = [record.first_token * 1e3 for record in records if record.first_token is not None]
    gaps = [gap * 1e3 for record in records for gap in record.gaps]
    counted = [record.prompt_tokens for record in records if record.prompt_tokens is not None]
    new_tokens = sum(record.new_tokens for record in records)
    return Summary(
        workload=workload.name,
        requests=len(records),
        failures=len(outcome.failures),
        short_replies=sum(record.new_tokens < workload.new_tokens for record in records),
        seconds=outcome.seconds,
        requests_per_s=len(records) / outcome.seconds,
        tokens_per_s=new_tokens / outcome.seconds,
        prompt_tokens=sum(counted) if counted else None,
        new_tokens=new_tokens,
        latency_p50=percentile(latencies, 50),
        latency_p99=percentile(latencies, 99),
        first_token_p50_ms=percentile(first_tokens, 50),
        first_token_p99_ms=percentile(first_tokens, 99),
        gap_p50_ms=percentile(gaps, 50),
        gap_p99_ms=percentile(gaps, 99),
        client_cpu=outcome.cpu_seconds / outcome.seconds,
    )


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Returns the smallest value that at least `percent` % of the values do not exceed; None when there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else None


LATENCIES = ("latency p50, s", "p99, s", "first token p50, ms", "p99, ms", "inter-token p50, ms", "p99, ms")
COLUMNS = ("load", "requests/s", "tokens/s", *LATENCIES, "client CPU")


def row(summary: Summary) -> list[str]:
    """Returns the cells for COLUMNS."""
    rates = (summary.requests_per_s, summary.tokens_per_s)
    latencies = (summary.latency_p50, summary.latency_p99)
    streams = (summary.first_token_p50_ms, summary.first_token_p99_ms, summary.gap_p50_ms, summary.gap_p99_ms)
    return [summary.workload, *map(number, (*rates, *latencies, *streams)), f"{summary.client_cpu:.1%}"]


def number(value: float | None) -> str:
    """Writes a number with three digits, or all those in front of the point."""
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Makes a Markdown table whose columns line up."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * (width - 1) + ":" for width in widths], *rows]
    return "\n".join("| " + " | ".join(map(str.rjust, line, widths)) + " |" for line in lines)


def finish(results: object, output: Path | None) -> None:
    """Prints what a command has measured as one line of JSON, and writes it to the file where one is given."""
    line = json.dumps(
        results,
        default=lambda value: asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value),
    )
    print(line)
    if output is not None:
        output.write_text(line + "\n")


def finish_run(run: Callable[[Namespace], object], arguments: Namespace, *errors: type[Exception]) -> None:
    """Finishes with what `run` measures, or exits with one of `errors`. An argument `threads` is for torch."""
    if threads := getattr(arguments, "threads", None):
        import torch  # which most commands do without

        torch.set_num_threads(threads)
    try:
        results = run(arguments)
    except errors as error:
        sys.exit(f"error: {error}")
    finish(results, arguments.output)


def tell(line: str) -> None:
    """Prints a line about how far a command has come."""
    print(line, file=sys.stderr, flush=True)
