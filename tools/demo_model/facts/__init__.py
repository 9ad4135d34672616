"""Tables of facts, one row a line, with `|` between the columns: what the corpus says is true everywhere in it."""

import csv
from pathlib import Path

_FOLDER = Path(__file__).parent


def rows(table: str) -> list[dict[str, str]]:
    """The rows of `table`.csv by column; what a short row leaves out is empty."""
    with (_FOLDER / f"{table}.csv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="|", restval="", quoting=csv.QUOTE_NONE))


def words(sort: str) -> tuple[str, ...]:
    """The words of one sort in words.csv."""
    return next(tuple(row["words"].split(",")) for row in rows("words") if row["sort"] == sort)
