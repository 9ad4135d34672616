"""The grammars of requests, compiled by the shards before they join a batch."""

import weakref
from hashlib import sha256
from itertools import count

from tgi_server.contract import Grammar
from tgi_server.router.errors import GenerationFailed, InvalidRequest, Unhealthy
from tgi_server.router.scheduling.shard_client import ShardedClient
from tgi_server.wire import grammar_to_message


class PinnedGrammars:
    """Has the shards compile grammars and keep them for as long as a request needs them.

    A request needs its grammar for as long as anything refers to the object. The shards learn that they may forget
    it when the next one is compiled, which is when they need the room.
    """

    def __init__(self, shards: ShardedClient) -> None:
        self._shards = shards
        self._pins = count(1)

    async def compile(self, grammar: Grammar, client: str) -> tuple[str, ...]:
        """Has the grammar compiled. Returns the constraints that are left to the model, each as a line.

        client: whose turn it takes.

        Raises InvalidRequest that says why the grammar cannot be used, Overloaded when the shards cannot compile it
        now, and GenerationFailed when they do not answer.
        """
        pin = next(self._pins)
        try:
            response = await self._shards.compile(grammar_to_message(grammar), pin, sha256(client.encode()).hexdigest())
        except Unhealthy as error:
            raise GenerationFailed(str(error)) from error
        if response.error:
            raise InvalidRequest(f"the grammar cannot be used: {response.error}", grammar.place)
        weakref.finalize(grammar, self._shards.release, pin).atexit = False
        return tuple(response.unenforced)
