"""Log lines: one event is one line, whatever a client has put into it."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from shared.logging import LONGEST_MESSAGE, configure_logging, one_line

FORGED = "2026-01-01T00:00:00.000Z INFO    router: all is well"
HOSTILE = f"name\n{FORGED}\r\x1b[31m\x00\u2028\x85"


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


BOTH_FORMATS = pytest.mark.parametrize("json_output", [False, True], ids=["text", "json"])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The log lines, split at everything that any program takes for the end of a line."""
    return capsys.readouterr().err.splitlines()


def message(line: str, *, json_output: bool) -> str:
    return str(json.loads(line)["message"]) if json_output else line


@BOTH_FORMATS
def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str], json_output: bool):
    configure_logging("router", json_output=json_output)
    logging.getLogger("test").info("refused: %s", HOSTILE, extra={"reason": HOSTILE})
    (line,) = lines(capsys)
    assert line.isprintable()
    said = message(line, json_output=json_output)
    assert said.isprintable()
    assert "name\\n2026" in said


@BOTH_FORMATS
def test_lines_are_bounded(capsys: pytest.CaptureFixture[str], json_output: bool):
    configure_logging("router", json_output=json_output)
    logging.getLogger("test").info("refused: %s", "x" * 2_000_000, extra={"reason": "y" * 2_000_000})
    (line,) = lines(capsys)
    assert len(line) < 2 * LONGEST_MESSAGE
    assert "more characters" in message(line, json_output=json_output)


def test_an_exception_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]):
    configure_logging("router")
    try:
        raise ValueError(f"bad\n{FORGED}\r{FORGED}" + "z" * 2_000_000)
    except ValueError:
        logging.getLogger("test").exception("it failed")
    head, *traceback = lines(capsys)
    assert head.endswith("it failed")
    assert all(line.startswith("  ") for line in traceback)
    assert any("ValueError: bad" in line for line in traceback)
    assert sum(map(len, traceback)) < 40_000


def test_numbers_stay_numbers_in_json(capsys: pytest.CaptureFixture[str]):
    configure_logging("router", json_output=True)
    logging.getLogger("test").info("answered", extra={"tokens": 3, "seconds": 0.5})
    entry: dict[str, Any] = json.loads(lines(capsys)[0])
    assert (entry["tokens"], entry["seconds"]) == (3, 0.5)


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("plain text, even é and 你", 100, "plain text, even é and 你"),
        ("a\nb\ud800", 100, "a\\nb\\ud800"),
        ("abcdef", 4, "abcd... (2 more characters)"),
    ],
)
def test_one_line(text: str, limit: int, expected: str):
    assert one_line(text, limit) == expected
