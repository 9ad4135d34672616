"""Logs of what tests start: a traceback in one of them is a fault, whatever the test was about."""

import logging
import re

TRACEBACK = "Traceback (most recent call last)"
LEVEL = re.compile(r"\d{4}-\d\d-\d\dT\S+ ([A-Z]+) ")
SHOWN_LINES = 40
# Loggers of the services; clients and stand-ins of tests have their own.
WATCHED = ("llm_functionalities", "shared", "tgi_server", "uvicorn")


def assert_no_traceback(log: str) -> None:
    """Raises AssertionError, with the place, when a log has a traceback: one that is shown without being asked for."""
    lines = log.splitlines()
    debugging = False
    for number, line in enumerate(lines):
        if level := LEVEL.match(line):
            debugging = level.group(1) == "DEBUG"
        if TRACEBACK in line and not debugging:
            shown = lines[max(0, number - 3) : number + SHOWN_LINES]
            raise AssertionError("a traceback is in the log:\n" + "\n".join(shown))


class Tracebacks(logging.Handler):
    """Keeps what services that run in this process log with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None and record.name.startswith(WATCHED):
            self.lines.append(self.format(record))
