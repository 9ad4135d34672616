"""Reports loading progress to one callback. One model is loaded at a time."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from transformers.utils import logging as transformers_logging

Report = Callable[[str, float], object]
T = TypeVar("T")

_report: Report | None = None


def report_to(report: Report | None) -> None:
    """Sets the callback, which gets the stage and its fraction from 0 to 1; None removes it."""
    global _report
    _report = report


def progress(stage: str, fraction: float = 0.0) -> None:
    """Reports the fraction of a stage that is done."""
    if _report is not None:
        _report(stage, fraction)


def counted(stage: str, items: Iterable[T], total: int) -> Iterator[T]:
    """Yields the items, and reports progress before each."""
    for number, item in enumerate(items):
        progress(stage, number / max(total, 1))
        yield item


def follow_transformers(stage: str) -> None:
    """Reports progress in place of the progress bar with which `transformers` reads weights."""

    def count(bar: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if _report is not None and named.get("desc") == "Loading weights" and len(arguments) == 1:
            return counted(stage, arguments[0], len(arguments[0]))
        return bar(*arguments, **named)

    transformers_logging.set_tqdm_hook(count)
