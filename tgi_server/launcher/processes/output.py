"""The lines that a child process prints."""

import asyncio
import json
import logging
import os
import re
import sys

logger = logging.getLogger(__name__)

CHUNK = 65536
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (?P<level>[A-Z]+) +[\w.-]+: (?P<message>.*)")
"""As shared/logging.py writes it."""
COMPLAINTS = frozenset({"ERROR", "CRITICAL"})


class ProcessLog:
    """Passes a child's lines on to standard error, and remembers the last one that tells of an error.

    Log lines name their process already and pass as they are; anything else gets the name put before it.
    """

    def __init__(self, name: str) -> None:
        self.complaint = ""
        self._name = name

    async def follow(self, pipe: int) -> None:
        """Reads the pipe until its other end is closed, then closes it. A line may have any length."""
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", buffering=0)
        )
        rest = b""
        try:
            while chunk := await stream.read(CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take(line.decode(errors="replace").rstrip())
            self._take(rest.decode(errors="replace").rstrip())
        finally:
            transport.close()

    def _take(self, line: str) -> None:
        if not line:
            return
        level, message = _parse(line)
        if level is None:
            logger.info("%s: %s", self._name, line.removeprefix(f"{self._name}: "))
        else:
            print(line, file=sys.stderr, flush=True)
        if level is None or level in COMPLAINTS:
            self.complaint = message.removeprefix(f"{self._name}: ").strip()


def _parse(line: str) -> tuple[str | None, str]:
    """Level and message of a log line, None and the whole line for any other."""
    if line.startswith("{"):
        try:
            entry = json.loads(line)
            return entry["level"], entry["message"]
        except (ValueError, KeyError):
            return None, line
    match = LOG_LINE.fullmatch(line)
    return (match["level"], match["message"]) if match else (None, line)
