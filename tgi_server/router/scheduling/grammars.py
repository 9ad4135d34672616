"""The grammars of requests, compiled by the shards before they join a batch."""

import weakref
from hashlib import sha256
from itertools import count

from tgi_server.contract import Grammar
from tgi_server.router.errors import GenerationFailed, InvalidRequest, Unhealthy
from tgi_server.router.scheduling.shard_client import ShardedClient
from tgi_server.wire import grammar_to_message


class PinnedGrammars:
    """Has the shards compile grammars and keep them while requests need them.

    A grammar is needed for as long as its Python object is referenced. The shards are told to release it with the next
    grammar to compile, as they need the memory only then.
    """

    def __init__(self, shards: ShardedClient) -> None:
        self._shards = shards
        self._pins = count(1)

    async def compile(self, grammar: Grammar, client: str) -> tuple[str, ...]:
        """Compiles a grammar on all shards. Returns one line for each constraint that is left to the model.

        client: the client's name: the shards compile grammars of different clients in turn.

        Raises InvalidRequest if the grammar cannot be used, Overloaded if the shards cannot compile it now, and
        GenerationFailed if they do not answer.
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
