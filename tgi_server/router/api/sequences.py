"""Sequences whose answer comes in one piece."""

import asyncio
from collections.abc import Sequence

from tgi_server.router.api.exchange import Exchange
from tgi_server.router.errors import ClientGone, RouterError
from tgi_server.router.sinks import CollectingSink
from tgi_server.router.stopping import StopSequences
from tgi_server.router.validation import CheckedRequest


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
    exchange: Exchange,
    requests: Sequence[CheckedRequest],
    *,
    reveal_stop: bool,
    logprobs: bool,
) -> list[CollectingSink]:
    """Generates one sequence for each request, all at once, and waits for all of them.

    reveal_stop: whether a stop sequence is part of the text that it ends.

    Raises GenerationFailed, or ClientGone as soon as the client closes its connection.
    """
    ending = _Ending(len(requests))
    tokenizer = exchange.service.tokenizer
    sinks: list[CollectingSink] = []
    for checked in requests:
        stops = StopSequences(checked.stop, reveal=reveal_stop) if checked.stop else None
        sink = CollectingSink(tokenizer, checked.input_ids, stops, ending)
        sinks.append(sink)
        exchange.submit(checked, sink, logprobs=logprobs)
    watcher = asyncio.ensure_future(_watch(exchange, ending))
    try:
        await ending.future
    finally:
        watcher.cancel()
    return sinks


async def _watch(exchange: Exchange, ending: _Ending) -> None:
    while (await exchange.request.receive())["type"] != "http.disconnect":
        pass
    ending(ClientGone("the client left"))
