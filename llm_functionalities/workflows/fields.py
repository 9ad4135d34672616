"""A prompt's input: what the assistant knows, one labelled line for each thing."""

import re

LONGEST_VALUE = 2000
"""Characters of one value: a whole recipe in the place of a step must not push the instruction out of the prompt."""


def labelled(*fields: tuple[str, str]) -> str:
    """`Label: value` lines of the fields that are not blank.

    Values come from users, so a value is kept to one line and cannot pass for one of the prompt's own headings.
    """
    lines = [(label, one_line(value)) for label, value in fields]
    return "\n".join(f"{label}: {value}" for label, value in lines if value)


def one_line(value: str) -> str:
    return re.sub(r"#{2,}", "#", " ".join(value.split()))[:LONGEST_VALUE].rstrip()


def at(values: "list[str] | tuple[str, ...]", index: int) -> str:
    """The value at `index`, or nothing: parallel lists of callers need not be equally long."""
    return values[index] if index < len(values) else ""
