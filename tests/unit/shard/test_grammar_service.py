"""The GrammarService on a real socket: pins of requests, clients that leave, and a service that is busy."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import GrammarServiceStub, add_GrammarServiceServicer_to_server
from tests import hostile_grammars as hostile
from tgi_server import demo_model
from tgi_server.contract import Grammar
from tgi_server.grammar import GrammarCompiler, Sandbox
from tgi_server.grammar.compiled import GROWTH_BYTES
from tgi_server.shard.grammar_queue import GrammarQueue
from tgi_server.shard.grammar_service import GrammarService
from tgi_server.wire import grammar_to_message

ROOM = 3


@pytest.fixture
def compiler() -> GrammarCompiler:
    """A compiler with room for three small grammars."""
    return GrammarCompiler(demo_model.PATH, 3072, [1], cache_bytes=ROOM * (GROWTH_BYTES + 2**22))


@pytest.fixture
def stub(compiler: GrammarCompiler, tmp_path: Path) -> Iterator[GrammarServiceStub]:
    server = grpc.server(ThreadPoolExecutor(8))
    queue = GrammarQueue(compiler, Sandbox(demo_model.PATH, 3072, [1]))
    add_GrammarServiceServicer_to_server(GrammarService(queue), server)
    url = f"unix:{tmp_path / 'grammars'}"
    server.add_insecure_port(url)
    server.start()
    with grpc.insecure_channel(url) as channel:
        yield GrammarServiceStub(channel)
    server.stop(0)
    queue.close()


def grammar(number: int) -> Grammar:
    return hostile.regex(f"[a-z]{{{number},99}}")


def compile_it(stub: GrammarServiceStub, number: int, **fields: object) -> pb.CompileResponse:
    return stub.Compile(pb.CompileRequest(grammar=grammar_to_message(grammar(number)), **fields), timeout=60)


def test_pinned_grammars_stay_and_make_others_wait(stub: GrammarServiceStub, compiler: GrammarCompiler) -> None:
    for number in range(ROOM):
        assert compile_it(stub, number, pin=number).size > 0
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as refusal:
            compile_it(stub, 77, pin=77)
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert all(compiler.size_of(grammar(number)) for number in range(ROOM))
    assert compile_it(stub, 77, pin=78, released=[1]).size > 0
    assert [bool(compiler.size_of(grammar(number))) for number in range(ROOM)] == [True, False, True]
    assert compile_it(stub, 1, pin=79, released=[78, 1, 12_345]).size > 0


def test_a_grammar_that_is_refused_has_no_pin(stub: GrammarServiceStub) -> None:
    for number in range(ROOM + 3):
        bad = pb.Grammar(type=pb.Grammar.REGEX, value=f"{number}(")
        assert stub.Compile(pb.CompileRequest(grammar=bad, pin=number), timeout=60).error
    for number in range(ROOM + 3):
        assert compile_it(stub, number).size > 0


@pytest.mark.slow
def test_a_client_that_leaves_has_no_pin(stub: GrammarServiceStub) -> None:
    slow = grammar_to_message(hostile.regex(hostile.optional_letters(100_000)))
    for number in range(ROOM + 3):
        call = stub.Compile.future(pb.CompileRequest(grammar=slow, pin=number))
        call.cancel()
    for number in range(ROOM + 3):
        assert compile_it(stub, number).size > 0
