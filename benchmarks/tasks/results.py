"""The answers of one server to all cases, and their tables."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.connection import Connection, ServerUnavailable, TimedResponse
from benchmarks.report import number, table, tell
from benchmarks.tasks.case import DECISIONS, TaskAnswer, TaskCase, TaskVerdict

# A server that does not have a route answers its requests with one of these.
_NOT_OFFERED = (404, 405, 501)
_OVERLOADED, _ATTEMPTS, _PAUSE_SECONDS = 429, 20, 0.5
_WRONG = TaskVerdict(0.0)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A case and its answer. response: the body, as JSON or as text. failure: why there is no answer to score.

    offered: False if the server does not have the route.
    """

    family: str
    name: str
    verdict: TaskVerdict
    seconds: float
    cut_off: bool = False
    failure: str | None = None
    offered: bool = True
    request: object = None
    response: object = None


@dataclass(frozen=True, slots=True)
class TaskRow:
    """The results of a family, or of several. valid: the share of answers bound by a schema that match it.

    cut_off: answers that reached `max_tokens`; failed: requests without an answer. seconds: of a request, in the mean.
    """

    family: str
    cases: int
    score: float
    valid: float | None
    loss: float | None
    cut_off: int
    failed: int
    seconds: float

    @classmethod
    def of(cls, family: str, results: Sequence[TaskResult]) -> "TaskRow":
        valid = [each.verdict.valid for each in results if each.verdict.valid is not None]
        losses = [each.verdict.loss for each in results if each.verdict.loss is not None]
        return cls(
            family,
            len(results),
            fmean(each.verdict.score for each in results),
            fmean(valid) if valid else None,
            fmean(losses) if losses else None,
            sum(each.cut_off for each in results),
            sum(each.failure is not None for each in results),
            fmean(each.seconds for each in results),
        )


@dataclass(frozen=True, slots=True)
class AnswersFile:
    """The answers of servers, a JSON object a line, written as they come."""

    path: Path

    def append(self, server: str, result: TaskResult) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"server": server, **asdict(result)}) + "\n")

    def read(self) -> dict[str, list[TaskResult]]:
        """Returns the results of each server. Raises ValueError for what is not such a file."""
        sides: dict[str, list[TaskResult]] = {}
        try:
            for line in self.path.read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                fields["verdict"] = TaskVerdict(**fields["verdict"])
                sides.setdefault(fields.pop("server"), []).append(TaskResult(**fields))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} has no answers that --answers wrote: {error}") from error
        return sides


async def ask(
    url: str, model: str, cases: Sequence[TaskCase], users: int, limit: float, note: Callable[[TaskResult], None]
) -> list[TaskResult]:
    """Asks all cases, `users` at once, in their order. limit: seconds for one request. note: gets results as they come.

    A failed request is a wrong answer. Returns the results in the order of the cases.
    """
    waiting = list(enumerate(cases))[::-1]
    results: dict[int, TaskResult] = {}

    async def work() -> None:
        with closing(Connection(url)) as connection:
            while waiting:
                place, case = waiting.pop()
                results[place] = await _ask(connection, model, case, limit)
                note(results[place])
                if len(results) % 25 == 0:
                    tell(f"  {len(results)} of {len(cases)}")

    await asyncio.gather(*(work() for _ in range(users)))
    return [results[place] for place in range(len(cases))]


async def _ask(connection: Connection, model: str, case: TaskCase, limit: float) -> TaskResult:
    request = {"model": model, **case.body}
    started = time.perf_counter()
    result = TaskResult(case.family, case.name, _WRONG, 0.0, request=request)
    try:
        response = await _response(connection, case.path, json.dumps(request).encode(), limit)
    except ServerUnavailable as error:
        return replace(result, seconds=time.perf_counter() - started, failure=str(error))
    result = replace(result, seconds=response.ended - response.started)
    text = response.body.decode(errors="replace")
    if response.status != 200:
        offered = case.path != DECISIONS or response.status not in _NOT_OFFERED
        return replace(result, failure=f"status {response.status}: {text[:300]}", offered=offered)
    try:
        body = json.loads(text)
        answer = TaskAnswer.read(body)
        verdict = await asyncio.to_thread(case.score, answer)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return replace(result, failure=f"cannot be read: {type(error).__name__} {error}", response=text[:2000])
    return replace(result, verdict=verdict, cut_off=answer.finish_reason == "length", response=body)


async def _response(connection: Connection, path: str, body: bytes, limit: float) -> TimedResponse:
    """Returns the response; asks again while the server is overloaded, so that scores do not depend on its load."""
    for _ in range(_ATTEMPTS - 1):
        response = await connection.request("POST", path, body, limit)
        if response.status != _OVERLOADED:
            return response
        await asyncio.sleep(_PAUSE_SECONDS)
    return await connection.request("POST", path, body, limit)


def rows(results: Iterable[TaskResult]) -> list[TaskRow]:
    """Returns a row for each family, and before those of a group one for all of them. Routes that a server does not
    have are left out.
    """
    families: dict[str, list[TaskResult]] = {}
    for each in results:
        if each.offered:
            group = each.family.partition(":")[0]
            families.setdefault(group, []).append(each)
            if each.family != group:
                families.setdefault(each.family, []).append(each)
    return [TaskRow.of(family, each) for family, each in families.items() if not _mixed(family, each)]


def _mixed(family: str, results: Sequence[TaskResult]) -> bool:
    """Returns True for a group whose families are the same questions asked in several ways: it has no score."""
    return len({each.name for each in results}) < len(results)


def print_tables(sides: Sequence[tuple[str, Sequence[TaskResult]]]) -> None:
    """Prints the scores of all servers side by side, and what else there is to tell of each answer."""
    of_sides = [(name, {row.family: row for row in rows(results)}) for name, results in sides]
    names = [name for name, _ in of_sides]
    families = dict.fromkeys(family for _, by_family in of_sides for family in by_family)
    kinds = ("score, %", "valid, %", "at max_tokens", "failed", "s")
    columns = ["family", "cases", *(f"{kind} {name}" for kind in kinds for name in names)]
    lines = []
    for family in families:
        row = [by_family.get(family) for _, by_family in of_sides]
        cells = [_cell(each, kind) for kind in kinds for each in row]
        lines.append([family, str(next(each.cases for each in row if each)), *cells])
    print(table(columns, lines))
    for name, by_family in of_sides:
        if scored := [row for row in by_family.values() if row.loss is not None]:
            print(f"\nDecisions of {name}: mean negative log-probability of the right answer")
            losses = [[row.family, f"{row.score:.1%}", f"{row.loss:.3f}"] for row in scored]
            print(table(("family", "right", "loss"), losses))


def _cell(row: TaskRow | None, kind: str) -> str:
    if row is None:
        return "-"
    match kind:
        case "score, %":
            return f"{100 * row.score:.1f}"
        case "valid, %":
            return "-" if row.valid is None else f"{math.floor(1000 * row.valid) / 10:.1f}"
        case "at max_tokens":
            return str(row.cut_off)
        case "failed":
            return str(row.failed)
    return number(row.seconds)
