"""The gRPC service that compiles grammars beside the steps of the engine, without delaying them."""

import logging
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import grpc

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import GrammarServiceServicer
from tgi_server.contract import Grammar
from tgi_server.engine.grammar import GrammarCompiler, InvalidGrammar
from tgi_server.wire import grammar_from_message

logger = logging.getLogger(__name__)

_THREADS = 2
_NICENESS = 10
_SECONDS = 10.0


class GrammarService(GrammarServiceServicer):
    """Calls come in threads of their own: the event loop stands still while a step computes.

    Requests for the same grammar that come together share one compilation; nobody waits for another's longer than it
    takes until a thread is free.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        """compiler: None where the model's folder has no tokenizer."""
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammars", initializer=_give_way)
        self._lock = threading.Lock()
        self._running: dict[Grammar, Future[None]] = {}

    def prepare(self) -> None:
        """Has a thread read the tokenizer, so that the first request with a grammar need not wait for it."""
        if self._compiler is not None:
            self._pool.submit(self._compiler.prepare)

    def Compile(self, request: pb.CompileRequest, context: grpc.ServicerContext) -> pb.CompileResponse:
        return pb.CompileResponse(error=self._fault(grammar_from_message(request.grammar)) or "")

    def _fault(self, grammar: Grammar) -> str | None:
        """Why the grammar cannot be used, in one line; None when it can."""
        if self._compiler is None:
            return "the model's folder has no tokenizer"
        if self._compiler.has(grammar):
            return None
        try:
            self._compilation(self._compiler, grammar).result(_SECONDS)
        except InvalidGrammar as error:
            return str(error)
        except TimeoutError:
            logger.warning("a grammar of %d bytes was not compiled within %g s", len(grammar.value), _SECONDS)
            return f"compiling it takes more than {_SECONDS:g} s"
        return None

    def _compilation(self, compiler: GrammarCompiler, grammar: Grammar) -> Future[None]:
        with self._lock:
            work = self._running.get(grammar)
            if work is None:
                work = self._running[grammar] = self._pool.submit(self._compile, compiler, grammar)
            return work

    def _compile(self, compiler: GrammarCompiler, grammar: Grammar) -> None:
        try:
            compiler.check(grammar)
        finally:
            with self._lock:
                del self._running[grammar]


def _give_way() -> None:
    """Lets the threads that compute steps go first. On Linux, niceness is a thread's own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
