"""Sequences whose answer comes in one piece, and waiting for a client that may leave."""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from tgi_server.router.api.exchange import Exchange
from tgi_server.router.errors import ClientGone, RouterError
from tgi_server.router.sinks import CollectingSink
from tgi_server.router.validation import CheckedRequest

T = TypeVar("T")


async def unless_client_leaves(exchange: Exchange, future: asyncio.Future[T]) -> T:
    """The result of `future`. Raises ClientGone as soon as the client closes its connection."""

    def give_up(_: asyncio.Task[None]) -> None:
        if not future.done():
            future.set_exception(ClientGone("the client left"))

    watcher = asyncio.ensure_future(_disconnected(exchange))
    watcher.add_done_callback(give_up)
    try:
        return await future
    finally:
        watcher.remove_done_callback(give_up)
        watcher.cancel()


async def _disconnected(exchange: Exchange) -> None:
    while (await exchange.request.receive())["type"] != "http.disconnect":
        pass


class _Ending:
    """Waits for the end of several sequences; the first failure ends the wait."""

    def __init__(self, sequences: int) -> None:
        self._open = sequences
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: RouterError | None) -> None:
        self._open -= 1
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        elif not self._open:
            self.future.set_result(None)


async def collect(
    exchange: Exchange, requests: Sequence[CheckedRequest], *, reveal_stop: bool, logprobs: bool
) -> list[CollectingSink]:
    """Generates one sequence for each request, all at once, and waits for all of them.

    reveal_stop: whether a stop sequence is part of the text that it ends.

    Raises GenerationFailed, or ClientGone.
    """
    ending = _Ending(len(requests))
    tokenizer = exchange.service.tokenizer
    sinks: list[CollectingSink] = []
    for checked in requests:
        sink = CollectingSink(tokenizer, checked.input_ids, checked.stop_sequences(reveal=reveal_stop), ending)
        sinks.append(sink)
        exchange.submit(checked, sink, logprobs=logprobs)
    await unless_client_leaves(exchange, ending.future)
    return sinks
