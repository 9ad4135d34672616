"""Grammars that shards keep while a request needs them, on real sockets."""

import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from shared.stubs.generate_pb2_grpc import add_GrammarServiceServicer_to_server
from tgi_server import demo_model
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.grammar import GrammarCompiler, Sandbox
from tgi_server.grammar.compiled import GROWTH_BYTES
from tgi_server.router.errors import InvalidRequest, Overloaded
from tgi_server.router.scheduling.grammars import PinnedGrammars
from tgi_server.router.scheduling.shard_client import ShardClient, ShardedClient
from tgi_server.shard.grammar_queue import GrammarQueue
from tgi_server.shard.grammar_service import GrammarService


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ShardedClient]:
    """A client of two shards, each with room for two small grammars."""
    servers, queues, shards = [], [], []
    for rank in range(2):
        compiler = GrammarCompiler(demo_model.PATH, 3072, [1], cache_bytes=2 * (GROWTH_BYTES + 2**22))
        queues.append(GrammarQueue(compiler, Sandbox(demo_model.PATH, 3072, [1])))
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
        assert await grammars.compile(grammar, "") == ()
    for _ in range(2):
        with pytest.raises(Overloaded, match="cannot be compiled now"):
            await grammars.compile(repeated(3), "")
    with pytest.raises(InvalidRequest, match="cannot be used") as refused:
        await grammars.compile(Grammar(GrammarKind.REGEX, "(", place="guided_regex"), "")
    assert refused.value.param == "guided_regex"
    again = repeated(1)
    assert await grammars.compile(again, "") == ()
    del grammar, needed[0]
    with pytest.raises(Overloaded):
        await grammars.compile(repeated(3), "")
    del again
    assert await grammars.compile(repeated(3), "") == ()
    assert await grammars.compile(repeated(4), "") == ()


async def test_what_is_left_to_the_model_is_told_by_all_shards_alike(client: ShardedClient) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}})
    lenient = Grammar(GrammarKind.JSON_SCHEMA, schema, lenient=("#",))
    assert await PinnedGrammars(client).compile(lenient, "") == ("pattern at #/properties/a",)
    with pytest.raises(InvalidRequest, match="'pattern'"):
        await PinnedGrammars(client).compile(Grammar(GrammarKind.JSON_SCHEMA, schema), "")
