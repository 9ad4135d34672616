"""Grammars that shards keep while a request needs them, on real sockets."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest

from shared.stubs.generate_pb2_grpc import add_GrammarServiceServicer_to_server
from tgi_server import demo_model
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.engine.grammar import GrammarCompiler, Sandbox
from tgi_server.engine.grammar.compiled import GROWTH_BYTES
from tgi_server.router.errors import Overloaded
from tgi_server.router.scheduling.grammars import PinnedGrammars
from tgi_server.router.scheduling.shard_client import ShardClient, ShardedClient
from tgi_server.shard.grammar_queue import GrammarQueue
from tgi_server.shard.grammar_service import GrammarService


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ShardedClient]:
    """A client of two shards, each with room for two small grammars."""
    servers, queues, shards = [], [], []
    for rank in range(2):
        compiler = GrammarCompiler(demo_model.PATH, 3072, [1], kept_bytes=2 * (GROWTH_BYTES + 2**22))
        queues.append(GrammarQueue(compiler, partial(Sandbox, demo_model.PATH, 3072, [1])))
        servers.append(grpc.server(ThreadPoolExecutor(8)))
        add_GrammarServiceServicer_to_server(GrammarService(queues[-1]), servers[-1])
        url = f"unix:{tmp_path / str(rank)}"
        servers[-1].add_insecure_port(url)
        servers[-1].start()
        shards.append(ShardClient(url, rank, url))
    client = ShardedClient(shards)
    yield client
    await client.close()
    for server, queue in zip(servers, queues, strict=True):
        server.stop(0)
        queue.close()


def repeated(count: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, f"[a-z]{{{count}}}")


async def test_a_grammar_is_kept_while_a_request_refers_to_it(client: ShardedClient) -> None:
    grammars = PinnedGrammars(client)
    needed = [repeated(1), repeated(2)]
    for grammar in needed:
        assert await grammars.fault(grammar) is None
    for _ in range(2):
        with pytest.raises(Overloaded, match="cannot be compiled now"):
            await grammars.fault(repeated(3))
    assert await grammars.fault(Grammar(GrammarKind.REGEX, "(")) is not None
    again = repeated(1)
    assert await grammars.fault(again) is None
    del grammar, needed[0]
    with pytest.raises(Overloaded):
        await grammars.fault(repeated(3))
    del again
    assert await grammars.fault(repeated(3)) is None
    assert await grammars.fault(repeated(4)) is None
