"""One child process, a shard or the router: its command, its life, and the lines that it prints."""

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.processes import die_with_parent

logger = logging.getLogger(__name__)

# Seconds to wait for the last lines of a child that has ended.
OUTPUT_SECONDS = 1.0
# Exit code of a shard whose device or peers are lost (EX_SOFTWARE of sysexits.h).
LOST_PEER_STATUS = 70
# Ranks of deaths at one moment, see Child.cause_rank.
KILLED, ENDED_BY_ITSELF, LOST_A_PEER = 0, 1, 2
READ_BYTES = 65536
# The form in which shared/logging.py writes it.
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (?P<level>[A-Z]+) +[\w.-]+: (?P<message>.*)")
ERROR_LEVELS = frozenset({"ERROR", "CRITICAL"})


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run, and its name in the log. environment: variables that are added to the launcher's own."""

    name: str
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


class Child:
    """A running process whose lines pass through the launcher's own output.

    It leads a process group of its own, so Ctrl-C in a terminal reaches the launcher alone, which then stops its
    children in order. When the launcher is killed, the kernel kills the child.
    """

    def __init__(self, command: Command, process: asyncio.subprocess.Process, output: int) -> None:
        """output: the end of the pipe from which the lines are read."""
        self.name = command.name
        self.log = ProcessLog(command.name)
        self.ended_at = math.inf  # on the monotonic clock, seconds
        self._process = process
        self._output = asyncio.create_task(self.log.follow(output))
        # Done, with the exit code as `Popen.returncode` has it, once the process is gone and its output is read.
        self.ended = asyncio.create_task(self._wait(), name=command.name)

    @classmethod
    async def start(cls, command: Command) -> "Child":
        # With a pipe of asyncio's own, the process would not count as ended while a child of it holds the pipe open.
        read_end, write_end = os.pipe()
        with os.fdopen(write_end, "wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # gRPC would log each start of a process; processes that its users start run other programs at once.
                env={"GRPC_ENABLE_FORK_SUPPORT": "0", **os.environ, **command.environment},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        return cls(command, process, read_end)

    async def stop(self, grace: float) -> None:
        """Ends the process by a signal, and kills it if it has not ended after `grace` seconds."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and its output is still read
                self._process.terminate()
            await asyncio.wait([self.ended], timeout=grace)
        self.kill()
        await self.ended

    def kill(self) -> None:
        """Kills the process, with all processes that it has started."""
        if not self.ended.done():
            self._kill_group()

    def exit_message(self) -> str:
        """Returns how the process ended, and the last error that it logged."""
        code = self.ended.result()
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += ", as happens when memory runs out"
        return f"{self.name} {how}: {self.log.last_error}" if self.log.last_error else f"{self.name} {how}"

    def cause_rank(self) -> tuple[int, float]:
        """Returns a sort key for processes that died at the same time; the smallest is the likeliest cause of others.

        A shard that loses a peer ends with LOST_PEER_STATUS, or is aborted by NCCL. It may do so before the peer that
        was killed has ended as a process.
        """
        code = self.ended.result()
        if code in (LOST_PEER_STATUS, -signal.SIGABRT):
            return LOST_A_PEER, self.ended_at
        return (ENDED_BY_ITSELF if code >= 0 else KILLED), self.ended_at

    async def _wait(self) -> int:
        code = await self._process.wait()
        self.ended_at = time.monotonic()
        self._kill_group()
        await asyncio.wait([self._output], timeout=OUTPUT_SECONDS)
        self._output.cancel()
        return code

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class ProcessLog:
    """Passes a child's lines on to standard error, and keeps the last one about an error.

    Log lines name their process already and pass as they are; anything else gets the name put before it. Lines in which
    the process says why it ends, as `shared.settings.fail` writes them, are only kept: its exit message has them.
    """

    def __init__(self, name: str) -> None:
        self.last_error = ""
        self.has_failed = False
        self._failure = (f"{name}: ", f"text-generation-{name}: ")
        self._name = name

    async def follow(self, pipe: int) -> None:
        """Reads the pipe until its other end is closed, then closes it. A line may have any length."""
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", buffering=0)
        )
        rest = b""
        try:
            while chunk := await stream.read(READ_BYTES):
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
        if level is None and line.startswith(self._failure):
            reason = message.partition(": ")[2].strip()
            self.last_error = f"{self.last_error}; {reason}" if self.has_failed else reason
            self.has_failed = True
            return
        if level is None or level in ERROR_LEVELS:
            self.last_error = message.strip()
        if level is None:
            logger.info("%s: %s", self._name, line)
        else:
            with contextlib.suppress(OSError):  # the disk of the log may be full for a while
                print(line, file=sys.stderr, flush=True)


def _parse(line: str) -> tuple[str | None, str]:
    """Returns level and message of a log line; None and the whole line for any other."""
    if line.startswith("{"):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return None, line
        level, message = entry.get("level"), entry.get("message")
        return (level, message) if isinstance(level, str) and isinstance(message, str) else (None, line)
    match = LOG_LINE.fullmatch(line)
    return (match["level"], match["message"]) if match else (None, line)
