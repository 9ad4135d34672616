import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from shared.stubs.generate_pb2_grpc import add_GrammarServiceServicer_to_server
from tests.grammars import compiler_fault
from tgi_server import demo_model
from tgi_server.contract import Grammar, GrammarType
from tgi_server.engine.grammar import GrammarCompiler, Sandbox
from tgi_server.engine.grammar.compiled import GROWTH_BYTES
from tgi_server.router.errors import InvalidRequest, Overloaded
from tgi_server.router.grammar import PinnedGrammars, requested_grammar
from tgi_server.router.schemas.grammar import GrammarType as RequestedGrammar
from tgi_server.router.shard_client import ShardClient, ShardedClient
from tgi_server.shard.grammar_queue import GrammarQueue
from tgi_server.shard.grammar_service import GrammarService

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def grammar(**fields: Any) -> Grammar | None:
    return requested_grammar(RequestedGrammar.model_validate(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    ],
)
def test_a_json_schema_in_all_its_forms(fields: dict[str, Any]):
    made = grammar(**fields)
    assert made is not None
    assert made.type is GrammarType.JSON_SCHEMA
    assert json.loads(made.value) == SCHEMA
    assert compiler_fault(made) is None


def test_any_json_object():
    made = grammar(type="json_object")
    assert made is not None
    assert json.loads(made.value) == {"type": "object"}


def test_a_schema_without_properties_is_welcome():
    made = grammar(type="json", value={"type": "array", "items": {"type": "string"}})
    assert made is not None
    assert compiler_fault(made) is None


def test_regex_lark_and_plain_text():
    assert grammar(type="regex", value="a+") == Grammar(GrammarType.REGEX, "a+")
    assert grammar(type="lark", value='start: "a"') == Grammar(GrammarType.LARK, 'start: "a"')
    assert grammar(type="text") is None
    assert requested_grammar(None) is None


@pytest.mark.parametrize("value", ["{", 3, ["a"], "[]", "null", "[" * 5000])
def test_what_is_no_schema(value: Any):
    with pytest.raises(InvalidRequest, match="JSON"):
        grammar(type="json", value=value)


def test_a_json_schema_must_be_there():
    with pytest.raises(InvalidRequest, match="needs the schema"):
        grammar(type="json_schema")


@pytest.mark.parametrize(
    "broken",
    [
        Grammar(GrammarType.REGEX, "["),
        Grammar(GrammarType.REGEX, "(?=a)"),
        Grammar(GrammarType.LARK, "start: absent"),
        Grammar(GrammarType.JSON_SCHEMA, '{"type": "strange"}'),
        Grammar(GrammarType.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:1/schema"}'),
    ],
)
def test_what_cannot_be_compiled_is_told_in_one_line(broken: Grammar):
    fault = compiler_fault(broken)
    assert fault
    assert "\n" not in fault


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ShardedClient]:
    """Of two shards, each with room for two small grammars."""
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
    return Grammar(GrammarType.REGEX, f"[a-z]{{{count}}}")


async def test_a_grammar_is_kept_while_a_request_refers_to_it(client: ShardedClient) -> None:
    grammars = PinnedGrammars(client)
    needed = [repeated(1), repeated(2)]
    for grammar in needed:
        assert await grammars.fault(grammar) is None
    for _ in range(2):
        with pytest.raises(Overloaded, match="cannot be compiled now"):
            await grammars.fault(repeated(3))
    assert await grammars.fault(Grammar(GrammarType.REGEX, "(")) is not None
    again = repeated(1)
    assert await grammars.fault(again) is None
    del grammar, needed[0]
    with pytest.raises(Overloaded):
        await grammars.fault(repeated(3))
    del again
    assert await grammars.fault(repeated(3)) is None
    assert await grammars.fault(repeated(4)) is None
