"""The way to an endpoint, which breaks off from time to time: a TCP proxy on loopback."""

import asyncio
import contextlib
import random
from collections import Counter
from typing import Literal

Fault = Literal["refuse", "hang", "reset"]
FAULTS: tuple[Fault, ...] = ("refuse", "hang", "reset")
WELL_SECONDS = (3.0, 9.0)
FAULTY_SECONDS = (0.5, 4.0)
PIECE = 65_536


class FlappingProxy:
    """Passes on what comes to `port` to the port `target` of 127.0.0.1, unless a fault is on.

    "refuse": nothing listens, and what was connected is reset; "hang": connections are accepted and nothing passes;
    "reset": connections break off after a random number of bytes of the answer.
    """

    def __init__(self, port: int, target: int) -> None:
        self.port = port
        self.faults: Counter[str] = Counter()
        self._target = target
        self._fault: Fault | None = None
        self._passes = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._passes.set()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def inflict(self, fault: Fault) -> None:
        self.faults[fault] += 1
        self._fault = fault
        if fault == "refuse":
            self._close()
        if fault == "hang":
            self._passes.clear()

    async def heal(self) -> None:
        self._fault = None
        self._passes.set()
        if self._server is None:
            await self.start()

    async def flap(self) -> None:
        """Goes from fault to fault until it is cancelled; all is well afterwards."""
        try:
            while True:
                for fault in random.sample(FAULTS, len(FAULTS)):
                    await asyncio.sleep(random.uniform(*WELL_SECONDS))
                    await self.inflict(fault)
                    await asyncio.sleep(random.uniform(*FAULTY_SECONDS))
                    await self.heal()
        finally:
            await self.heal()

    async def stop(self) -> None:
        self._close()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            self._open.add(back)
            ways = [asyncio.create_task(self._pass(reader, back)), asyncio.create_task(self._pass(there, writer, True))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._drop(back)
        self._drop(writer)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool = False) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE):
                await self._passes.wait()
                if self._fault == "reset" and answers:
                    writer.write(piece[: random.randrange(len(piece))])
                    await writer.drain()
                    return
                writer.write(piece)
                await writer.drain()

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        """Closes it at once; what was broken off looks like it on the other side."""
        writer.transport.abort()
        self._open.discard(writer)
