"""The launchers of the other machines, once all have met."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from tgi_server.launcher.errors import ProcessEndedError
from tgi_server.launcher.nodes.link import Link, Lost, Word


class Peers:
    """Node 0 has a link to each other node; each of them has one to node 0, which passes on why a node failed."""

    def __init__(self, links: Sequence[Link], store_port: int, *, first: bool) -> None:
        """store_port: where the shards of all nodes meet, on node 0. first: whether this is node 0."""
        self.store_port = store_port
        self.first = first
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises ProcessEndedError as soon as another node has failed."""
        self.lost_at = math.inf
        """When that was, on the monotonic clock."""
        self._links = links
        self._on_stop: Callable[[], None] | None = None
        self._listeners = [asyncio.create_task(self._listen(link)) for link in links]

    def on_stop(self, action: Callable[[], None]) -> None:
        """action: called when another node passes on that the server is to stop."""
        self._on_stop = action

    def say_stop(self) -> None:
        for link in self._links:
            link.say(Word.STOP)

    def say_failed(self, reason: str) -> None:
        """reason: what died here, or on another node."""
        for link in self._links:
            link.say(Word.FAILED, reason=reason)

    async def close(self) -> None:
        for listener in self._listeners:
            listener.cancel()
        await asyncio.gather(*(link.close() for link in self._links))
        if not self.lost.done():
            self.lost.cancel()
        elif not self.lost.cancelled():
            self.lost.exception()  # has been seen, one way or another

    async def _listen(self, link: Link) -> None:
        try:
            while True:
                message = await link.hear()
                if message["word"] == Word.FAILED:
                    reason = str(message.get("reason"))
                    self._fail(reason if reason.startswith("node ") else f"{link.name}: {reason}")
                elif message["word"] == Word.STOP:
                    self._stop()
                    if not self.first:
                        return  # node 0 closes its end after that
        except Lost as error:
            self._fail(str(error))

    def _stop(self) -> None:
        if self._on_stop is None:
            self._fail("it was stopped while it started")
        else:
            self._on_stop()

    def _fail(self, reason: str) -> None:
        if not self.lost.done():
            self.lost_at = time.monotonic()
            self.lost.set_exception(ProcessEndedError(reason))
