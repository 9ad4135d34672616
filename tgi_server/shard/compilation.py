"""Compiles grammars beside the steps of the engine, without delaying them."""

import asyncio
import logging
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from tgi_server.engine.grammar import GrammarCompiler, InvalidGrammar
from tgi_server.engine.parameters import Grammar

logger = logging.getLogger(__name__)

_THREADS = 2
_NICENESS = 10
_SECONDS = 10.0


class Compilation:
    """Requests for the same grammar that come together share one compilation; nobody waits for another's longer than
    it takes until a thread is free.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammars", initializer=_give_way)
        self._running: dict[Grammar, Future[None]] = {}

    def prepare(self) -> None:
        """Has a thread read the tokenizer, so that the first request with a grammar need not wait for it."""
        self._pool.submit(self._compiler.prepare)

    async def fault(self, grammar: Grammar) -> str | None:
        """Why the grammar cannot be used, in one line; None when it can."""
        work = self._running.get(grammar)
        if work is None:
            work = self._running[grammar] = self._pool.submit(self._compiler.check, grammar)
            work.add_done_callback(lambda _: self._running.pop(grammar, None))
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(work)), _SECONDS)
        except InvalidGrammar as error:
            return str(error)
        except TimeoutError:
            logger.warning("a grammar of %d bytes was not compiled within %g s", len(grammar.value), _SECONDS)
            return f"compiling it takes more than {_SECONDS:g} s"
        return None


def _give_way() -> None:
    """Lets the threads that compute steps go first. On Linux, niceness is a thread's own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
