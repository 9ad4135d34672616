"""A prompt's input: what the assistant knows, one labelled line for each thing."""

import re
from collections.abc import Sequence

LONGEST_VALUE = 2000
"""Characters of one value: a whole recipe in the place of a step must not push the instruction out of the prompt."""

LONGEST_INPUT = 4 * LONGEST_VALUE
"""Characters of a value that are looked at, so that megabytes of white space cost nothing."""


def labelled(*fields: tuple[str, str]) -> str:
    """`Label: value` lines of the fields that are not blank.

    Values come from users, so a value is kept to one line and cannot pass for one of the prompt's own headings.
    """
    lines = [(label, one_line(value)) for label, value in fields]
    return "\n".join(f"{label}: {value}" for label, value in lines if value)


def one_line(value: str) -> str:
    line = " ".join(value[:LONGEST_INPUT].split())
    return re.sub(r"#{2,}", "#", line)[:LONGEST_VALUE].rstrip()


def is_blank(value: str) -> bool:
    """Returns True if a prompt would have nothing of `value`."""
    return not value[:LONGEST_INPUT].strip()


def at(values: Sequence[str], index: int) -> str:
    """The value at `index`, or nothing: parallel lists of callers need not be equally long."""
    return values[index] if index < len(values) else ""
