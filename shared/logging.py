"""Log lines that a person can follow, or one JSON object a line for machines.

Whatever a client has put into a message, one event stays one line of bounded length.
"""

import json
import logging
import sys
import time
from typing import Any

# Characters. What is longer is cut.
LONGEST_MESSAGE = 4_000

_LONGEST_FIELD = 1_000
_LONGEST_TRACEBACK = 32_000

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(service: str, *, level: str = "INFO", json_output: bool = False) -> None:
    """Sends the process's log lines to standard error. `service` names the process in each line.

    Whatever is passed as `extra` to a log call follows the message as `name=value`, or becomes a field in JSON.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if json_output else _LineFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("httpx", "httpx2", "httpcore", "urllib3", "filelock", "asyncio", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def one_line(text: str, limit: int) -> str:
    """Returns the text on one line, cut after `limit` characters, with unprintable characters escaped, as in `\\n`."""
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit} more characters)"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _message(record: logging.LogRecord) -> str:
    return one_line(record.getMessage(), LONGEST_MESSAGE)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {
        name: one_line(value, _LONGEST_FIELD) if isinstance(value, str) else value
        for name, value in vars(record).items()
        if name not in _STANDARD
    }


def _traceback(text: str) -> str:
    """Returns a traceback, indented, so that no line of it begins like a log line whatever the exception says."""
    lines = "\n".join(f"  {one_line(line, LONGEST_MESSAGE)}" for line in text.splitlines())
    return lines if len(lines) <= _LONGEST_TRACEBACK else f"{lines[:_LONGEST_TRACEBACK]}\n  ..."


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class _LineFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _extra(record).items())
        line = f"{_timestamp(record)} {record.levelname:<7} {self._service}: {_message(record)}{fields}"
        return f"{line}\n{_traceback(self.formatException(record.exc_info))}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "timestamp": _timestamp(record),
            "level": record.levelname,
            "service": self._service,
            "message": _message(record),
            **_extra(record),
        }
        if record.exc_info:
            entry["exception"] = _traceback(self.formatException(record.exc_info))
        return json.dumps(entry, default=str)
