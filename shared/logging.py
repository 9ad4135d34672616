"""Log lines that a person can follow, or one JSON object a line for machines.

Whatever a client has put into a message, one event stays one line of bounded length.
"""

import atexit
import heapq
import io
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from itertools import count, islice
from typing import Any

# Characters. What is longer is cut.
LONGEST_MESSAGE = 4_000

_LONGEST_FIELD = 1_000
_LONGEST_TRACEBACK = 32_000

# Bytes of lines that wait for the reader of standard error.
_MAX_WAITING = 4 * 2**20
# Seconds for which the end of a process waits for its last lines to be read.
_FLUSH_SECONDS = 1.0
# Seconds between two writes: waking the thread for each line of a busy process takes as long as making the line.
_PAUSE_SECONDS = 0.02

# Names of log levels, including those of TGI and of other services. TRACE logs everything, OFF nothing.
_LEVELS = {
    "TRACE": "DEBUG",
    "DEBUG": "DEBUG",
    "INFO": "INFO",
    "WARN": "WARNING",
    "WARNING": "WARNING",
    "ERROR": "ERROR",
    "CRITICAL": "CRITICAL",
    "OFF": "OFF",
}
# TGI's names of the processes, by the first part of their names here.
_TARGETS = {
    "launcher": "text_generation_launcher",
    "router": "text_generation_router",
    "shard": "text_generation_server",
    "download": "text_generation_server",
    "quantize": "text_generation_server",
}
_OFF = logging.CRITICAL + 1

# The time in a log line, as text or as JSON.
_TIME = re.compile(rb'(?:\{"timestamp": ")?(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z)')

# What a record has before the fields of `extra`, and what other handlers may add.
_FIRST_FIELDS = len(vars(logging.makeLogRecord({})))
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def parse_levels(text: str) -> dict[str, str]:
    """Returns the log levels of a filter such as `info,text_generation_router=debug`, by process or logger.

    The empty name stands for all others. Raises ValueError.
    """
    levels: dict[str, str] = {}
    for directive in filter(None, (part.strip() for part in text.split(","))):
        target, _, name = (part.strip() for part in directive.rpartition("="))
        if name.upper() not in _LEVELS or (not target and "=" in directive) or not set(target).isdisjoint(' [{="'):
            raise ValueError(
                f"{directive!r} is not a log level; use DEBUG, INFO, WARNING or ERROR, or several, such as "
                "info,text_generation_router=debug"
            )
        levels[target.replace("::", ".")] = _LEVELS[name.upper()]
    if not levels:
        raise ValueError("it names no log level; use DEBUG, INFO, WARNING or ERROR")
    return levels


def configure_logging(
    service: str, *, level: str = "INFO", json_output: bool = False, order_seconds: float = 0.0
) -> None:
    """Sends the process's log lines to standard error. `service` names the process in each line.

    level: the least severity that is logged, or a filter as `parse_levels` takes it. order_seconds: how long lines wait
    for others with an earlier time, for a process that passes on the lines of others.

    Whatever is passed as `extra` to a log call follows the message as `name=value`, or becomes a field in JSON.
    No thread waits for the reader of standard error, tracebacks and `print` included: see _BackgroundWriter.
    """
    # No line shows these, and each takes time ("Optimization" in Python's documentation of `logging`).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    formatter = _JsonFormatter(service) if json_output else _LineFormatter(service)
    _write_in_background(formatter, order_seconds)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.addLevelName(_OFF, "OFF")
    levels = {target: logging.getLevelName(name) for target, name in parse_levels(level).items()}
    own = _TARGETS.get(service.partition("-")[0], service)
    logging.basicConfig(level=levels.get(own, levels.get("", logging.INFO)), handlers=[handler], force=True)
    for chatty in ("httpx", "httpx2", "httpcore", "urllib3", "filelock", "asyncio", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    for target, severity in levels.items():
        if target and target != own:
            logging.getLogger(target).setLevel(severity)


def flush_log() -> None:
    """Waits until all lines are written, but no longer than a second: their reader may stand still.

    The end of the interpreter does so by itself; call this before `os._exit`.
    """
    writer = getattr(sys.stderr, "buffer", None)
    if isinstance(writer, _BackgroundWriter):
        writer.drain(_FLUSH_SECONDS)


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
        for name, value in islice(vars(record).items(), _FIRST_FIELDS, None)
        if name not in _STANDARD
    }


def _traceback(text: str) -> str:
    """Returns a traceback, indented, so that no line of it begins like a log line whatever the exception says."""
    lines = "\n".join(f"  {one_line(line, LONGEST_MESSAGE)}" for line in text.splitlines())
    return lines if len(lines) <= _LONGEST_TRACEBACK else f"{lines[:_LONGEST_TRACEBACK]}\n  ..."


def _timestamp(record: logging.LogRecord) -> str:
    return _iso(record.created)


def _iso(seconds: float) -> str:
    """Returns a time in ISO 8601 with milliseconds; such times sort as texts."""
    return f"{_second(int(seconds))}.{int(seconds * 1000) % 1000:03d}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _write_in_background(formatter: logging.Formatter, order_seconds: float) -> None:
    """Has a thread write what is written to sys.stderr, unless that is not a file of the system."""
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError):  # it was closed when the process began, or is a test's
        return

    def notice(lines: int) -> str:
        told = "%d lines of the log were dropped, because standard error took no more"
        return formatter.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, told, (lines,), None))

    writer = _BackgroundWriter(descriptor, notice, order_seconds)
    sys.stderr = io.TextIOWrapper(
        writer, encoding=sys.stderr.encoding, errors="backslashreplace", newline="\n", line_buffering=True
    )
    atexit.register(flush_log)
    os.register_at_fork(before=flush_log)  # a child writes by itself, and after what was written before it


class _BackgroundWriter(io.RawIOBase):
    """A file whose `write` returns at once: a thread writes to the descriptor.

    An event loop that logs would stand still, and its deadlines and signals with it, while nothing reads the pipe that
    standard error may be. Lines for which there is no room are dropped, and so are those that cannot be written; how
    many is logged after the next that are written.
    """

    def __init__(self, descriptor: int, notice: Callable[[int], str], order_seconds: float) -> None:
        """notice: returns the line that says how many lines were dropped.

        order_seconds: how long a line waits for others with an earlier time; 0: lines are written as they come.
        """
        self._descriptor = descriptor
        self._notice = notice
        self._order_seconds = order_seconds
        self._changed = threading.Condition()
        # Lines with their times, the earliest first; lines of one time in the order in which they came.
        self._waiting: list[tuple[str, int, bytes]] = []
        self._size = 0  # bytes of them
        self._numbers = count()
        self._draining = False
        self._writing = False
        self._idle = False  # the thread waits for the next line
        self._dropped = 0  # lines, not reported yet
        self._thread = threading.Thread(target=self._run, name="standard error", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        lines = bytes(data)
        if not self._thread.is_alive():  # this process is a fork, in which the thread does not run
            self._write(lines)
            return len(lines)
        with self._changed:
            if self._waiting and self._size + len(lines) > _MAX_WAITING:
                self._dropped += lines.count(b"\n")
            else:
                if self._idle:  # otherwise the thread looks again by itself
                    self._idle = False
                    self._changed.notify_all()
                heapq.heappush(self._waiting, (self._time_of(lines), next(self._numbers), lines))
                self._size += len(lines)
        return len(lines)

    def _time_of(self, lines: bytes) -> str:
        if not self._order_seconds:
            return ""
        found = _TIME.match(lines)
        return found[1].decode() if found else _iso(time.time())

    def _take(self) -> bytes:
        """Returns the lines that are due."""
        limit = _iso(time.time() - self._order_seconds)
        taken = []
        while self._waiting and (self._draining or self._waiting[0][0] <= limit):
            taken.append(heapq.heappop(self._waiting)[2])
        lines = b"".join(taken)
        self._size -= len(lines)
        return lines

    def drain(self, seconds: float) -> None:
        """Waits until all that was given to `write` is written, for so many seconds at most."""
        if self._thread.is_alive():
            with self._changed:
                self._draining = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._waiting and not self._writing, seconds)
                self._draining = False

    def _pause(self, seconds: float) -> None:
        """Waits, unless the process ends."""
        if seconds > 0 and not self._draining:
            self._changed.wait_for(lambda: self._draining, seconds)

    def _run(self) -> None:
        written = 0.0
        while True:
            with self._changed:
                self._pause(written + _PAUSE_SECONDS - time.monotonic())
                self._idle = True
                self._changed.wait_for(lambda: self._waiting)
                self._idle = False
                self._pause(self._order_seconds)
                lines = self._take()
                dropped = self._dropped
                self._writing = True
            failed = self._write(lines).count(b"\n")
            written = time.monotonic()
            told = dropped and not failed and not self._write(f"{self._notice(dropped)}\n".encode())
            with self._changed:
                self._dropped += failed - (dropped if told else 0)
                self._writing = False
                self._changed.notify_all()

    def _write(self, data: bytes) -> bytes:
        """Returns what could not be written, as on a disk that is full."""
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            pass
        return data


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
