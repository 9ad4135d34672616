"""The gRPC service that compiles grammars concurrently with the engine's steps, without delaying them."""

import threading
from concurrent.futures import Future

import grpc

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import GrammarServiceServicer
from tgi_server.contract import Grammar
from tgi_server.grammar import GrammarCompiler, InvalidGrammar
from tgi_server.grammar.compiled import GrammarSource
from tgi_server.shard.errors import GrammarsBusy
from tgi_server.shard.grammar_queue import GrammarQueue
from tgi_server.wire import grammar_from_message

# Time-out. On a busy machine a trial of 0.1 s takes many times as long, because of its low priority.
_SECONDS = 60.0


class GrammarService(GrammarServiceServicer):
    """Compiles grammars in threads, because the event loop is blocked while a step computes."""

    def __init__(self, queue: GrammarQueue | None) -> None:
        """queue: None if the model's folder has no tokenizer."""
        self._queue = queue
        self._lock = threading.Lock()
        self._pins: dict[int, Grammar] = {}

    def Compile(self, request: pb.CompileRequest, context: grpc.ServicerContext) -> pb.CompileResponse:
        """Compiles a grammar. Responds with RESOURCE_EXHAUSTED if that takes too long: a later attempt may succeed.

        A grammar is pinned before it is compiled, so that it is not evicted in between. It is unpinned if compiling
        fails, or if the client is gone, which may have released the pin before it was set.
        """
        if self._queue is None:
            return pb.CompileResponse(error="the model's folder has no tokenizer")
        gone: Future[None] = Future()
        context.add_callback(lambda: gone.set_result(None))
        grammar = grammar_from_message(request.grammar)
        for pin in request.released:
            self._unpin(self._queue.compiler, pin)
        if request.HasField("pin"):
            self._pin(self._queue.compiler, request.pin, grammar)
        size = 0
        try:
            known = request.size if request.HasField("size") else None
            size = self._queue.compile(grammar, _SECONDS, gone, known, request.leniency, request.client)
            found = self._queue.compiler.cache.find(grammar)
        except InvalidGrammar as error:
            return pb.CompileResponse(error=str(error))
        except GrammarsBusy as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            if gone.done() or not size:
                self._unpin(self._queue.compiler, request.pin)
        source = found.source if found else GrammarSource("")
        return pb.CompileResponse(size=size, unenforced=source.unenforced, leniency=source.leniency)

    def _pin(self, compiler: GrammarCompiler, pin: int, grammar: Grammar) -> None:
        with self._lock:
            self._pins[pin] = grammar
        compiler.cache.pin(grammar)

    def _unpin(self, compiler: GrammarCompiler, pin: int) -> None:
        with self._lock:
            grammar = self._pins.pop(pin, None)
        if grammar is not None:
            compiler.cache.unpin(grammar)
