"""A connection between the launchers of two machines."""

import asyncio
import contextlib
import json
from enum import StrEnum
from typing import Any

ALIVE_SECONDS = 1.0
"""How often each side says that it is there."""
SILENCE_SECONDS = 5.0
"""After so long without a word the other machine counts as gone: its power may have failed, or the network."""
MAX_LINE = 65536


class Word(StrEnum):
    """What launchers tell each other."""

    JOIN = "join"
    """From a node to node 0: it is ready to start its shards."""
    REFUSED = "refused"
    """From node 0: that node does not fit, and why."""
    START = "start"
    """From node 0, once all have joined: at which port the shards meet."""
    ALIVE = "alive"
    STOP = "stop"
    """To node 0: the user asked a node to stop. From node 0: all requests are done, so the shards may end."""
    FAILED = "failed"
    """Something died, and what."""


class Lost(Exception):
    """The other side cannot be heard any more."""


class Link:
    """One end. Messages are JSON objects, a line each."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """name: of the other side, for people."""
        self.name = name
        self._reader = reader
        self._writer = writer
        self._alive = asyncio.create_task(self._stay_alive())

    @classmethod
    async def connect(cls, name: str, host: str, port: int) -> "Link":
        """Raises OSError."""
        return cls(name, *await asyncio.open_connection(host, port, limit=MAX_LINE))

    def say(self, word: Word, **details: Any) -> None:
        """Sends a message; whether it arrives is the other side's to notice."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"word": word, **details}).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        """The next message. Raises Lost."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    line = await self._reader.readline()
                if not line:
                    raise Lost(f"{self.name} has gone without a word")
                message: dict[str, Any] = json.loads(line)
                if Word(message["word"]) is not Word.ALIVE:
                    return message
            except TimeoutError as error:
                raise Lost(f"{self.name} has not been heard of for {SILENCE_SECONDS:.0f} s") from error
            except OSError as error:
                raise Lost(f"{self.name} cannot be reached any more: {error.strerror or error}") from error
            except (ValueError, KeyError, TypeError) as error:
                raise Lost(f"{self.name} does not speak as a launcher does") from error

    async def close(self) -> None:
        """What was said before still arrives."""
        self._alive.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ALIVE_SECONDS):
                await self._writer.wait_closed()

    async def _stay_alive(self) -> None:
        while True:
            self.say(Word.ALIVE)
            await asyncio.sleep(ALIVE_SECONDS)
