"""One child process: a shard or the router."""

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tgi_server.launcher.processes.output import ProcessLog
from tgi_server.launcher.processes.parent import die_with_parent

OUTPUT_SECONDS = 1.0
"""How long a dead child's last lines are waited for."""


AFTERMATH_STATUS = 70
"""With which a shard ends that computes no more (EX_SOFTWARE of sysexits.h)."""
SECOND_GUESS, AFTERMATH = 1, 2


@dataclass(frozen=True, slots=True)
class Command:
    """What to run under which name. `environment` is added to the launcher's own."""

    name: str
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


class Child:
    """A running process whose lines pass through the launcher's own output.

    It leads a process group of its own, so Ctrl-C in a terminal reaches the launcher alone, which then stops its
    children in order. When the launcher is killed, the kernel kills the child.
    """

    def __init__(self, command: Command, process: asyncio.subprocess.Process, output: int) -> None:
        """output: the pipe's end from which its lines are read."""
        self.name = command.name
        self.log = ProcessLog(command.name)
        self.ended_at = math.inf
        """When the process ended, on the monotonic clock."""
        self._process = process
        self._output = asyncio.create_task(self.log.follow(output))
        self.ended = asyncio.create_task(self._wait(), name=command.name)
        """Done, with the exit code as `Popen.returncode` has it, once the process is gone and its output is read."""

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
                env={**os.environ, **command.environment},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        return cls(command, process, read_end)

    async def stop(self, grace: float) -> None:
        """Asks it to end, and kills it when it has not done so after `grace` seconds."""
        if not self.ended.done():
            self._process.terminate()
            await asyncio.wait([self.ended], timeout=grace)
        self.kill()
        await self.ended

    def kill(self) -> None:
        """Ends it at once, with all that it has started."""
        if not self.ended.done():
            self._kill_group()

    def epitaph(self) -> str:
        """How it ended, and the last thing that it complained about."""
        code = self.ended.result()
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += ", as happens when memory runs out"
        return f"{self.name} {how}: {self.log.complaint}" if self.log.complaint else f"{self.name} {how}"

    def suspicion(self) -> tuple[int, float]:
        """The less, the more likely it is that other deaths of the same moment follow from this one.

        A shard that misses another one ends with AFTERMATH_STATUS, or is aborted by NCCL. That it is missed may be seen
        before the one that was killed has ended as a process.
        """
        code = self.ended.result()
        if code in (AFTERMATH_STATUS, -signal.SIGABRT):
            return AFTERMATH, self.ended_at
        return (SECOND_GUESS if code >= 0 else 0), self.ended_at

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
