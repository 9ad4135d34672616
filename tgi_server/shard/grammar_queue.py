"""The queues of grammars to compile: those known to be cheap, and those that are tried in a sandbox first."""

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from tgi_server.contract import Grammar, GrammarKind
from tgi_server.fairness import FairOrder
from tgi_server.grammar import GrammarCompiler, InvalidGrammar, NoRoomForGrammar, Sandbox, SandboxLimit
from tgi_server.grammar.compiled import GROWTH_BYTES, CompiledGrammar
from tgi_server.grammar.compiler import check_size
from tgi_server.grammar.json_schema import MOST_LENIENT, is_simple
from tgi_server.shard.errors import GrammarsBusy

logger = logging.getLogger(__name__)

# Compiled by every shard at its start, which fills caches that all grammars share.
_FIRST_GRAMMAR = Grammar(GrammarKind.REGEX, "a")

_REMEMBERED_FAULTS = 1_024
_SAVED_SECONDS = 16.0


class _Job:
    """A grammar to be compiled.

    size: bytes that it may grow to, if that is known. waiting: number of requests that wait for it. leniency: level to
    begin with, see `enforced_schema`. clients: names of the requests' clients. lane: the lane in which it waits; None
    while it does not wait.
    """

    def __init__(self, grammar: Grammar, size: int | None, leniency: int) -> None:
        self.grammar = grammar
        self.size = size
        self.leniency = leniency
        self.clients: list[str] = []
        self.lane: _Lane | None = None
        self.done: Future[Any] = Future()
        self.waiting = 0


class _Lane:
    """A queue of grammars with the same time limit. Clients take turns; a client's smallest grammar goes first."""

    def __init__(self, cpu_seconds: float, niceness: int, threads: int, room: int, share: float) -> None:
        """cpu_seconds: limit of one trial. niceness: of the trials' processes. threads: number of trials at once. room:
        maximum number of waiting grammars. share: share of a core that the trials may use in the long run; unused time
        of the last _SAVED_SECONDS may be used at once.
        """
        self.cpu_seconds = cpu_seconds
        self.niceness = niceness
        self.threads = threads
        self._room = room
        self._share = share
        self._paid_until = 0.0
        self._order = FairOrder[_Job](lambda job: job.lane is not self)
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """Returns the number of queued grammars; a grammar of several clients counts several times."""
        return len(self._order)

    def put(self, job: _Job, *, turn_away: bool = True) -> _Job | None:
        """Queues a job. Returns the job that is refused if the queue is full: the largest one of the client with the
        most jobs.
        """
        with self._changed:
            job.lane = self
            for client in job.clients:
                self._order.add(client, job, job.grammar.text_bytes())
            self._changed.notify()
            refused = self._order.drop_beyond(self._room) if turn_away else None
            if refused is not None:
                refused.lane = None
            return refused

    def join(self, job: _Job, client: str) -> None:
        """Adds a client to a queued job, which then also has the turns of that client."""
        with self._changed:
            if job.lane is self:
                self._order.add(client, job, job.grammar.text_bytes())

    @contextmanager
    def turn(self) -> Iterator[_Job]:
        """Waits for a job, and until the trials have used no more than their share. The job's turn is the context."""
        while (early := self._paid_until - time.monotonic()) > 0:
            time.sleep(early)
        with self._changed:
            while (begun := self._order.begin()) is None:
                self._changed.wait()
            number, job = begun
            job.lane = None
        try:
            yield job
        finally:
            with self._changed:
                self._order.end(number)

    def pay(self, cpu_seconds: float) -> None:
        """Charges CPU seconds of a trial. The next trials wait until the lane is within its share again."""
        with self._changed:
            saved = time.monotonic() - _SAVED_SECONDS
            self._paid_until = max(self._paid_until, saved) + cpu_seconds / self._share


class GrammarQueue:
    """Has grammars tried in a sandbox, and compiles those that pass.

    Simple JSON schemas, and grammars that another shard has tried, have a separate lane without trials. Most others are
    tried within milliseconds, in the quick lane. Grammars that take longer move to the slow lane, where they delay only
    each other. Concurrent requests for the same grammar share a job, and errors of grammars are cached. Clients take
    turns, by the time that their grammars have taken.
    """

    def __init__(self, compiler: GrammarCompiler, sandbox: Sandbox) -> None:
        self.compiler = compiler
        self._sandbox = sandbox
        self._sure = _Lane(cpu_seconds=0.0, niceness=0, threads=1, room=64, share=1.0)
        self._slow = _Lane(cpu_seconds=2.0, niceness=19, threads=1, room=4, share=0.1)
        self._quick = _Lane(cpu_seconds=0.1, niceness=10, threads=2, room=64, share=0.1)
        self._lock = threading.Lock()
        self._started = False
        self._unready: list[threading.Event] = []  # of the threads, set once they compile
        self._running: dict[Grammar, _Job] = {}
        self._faults: OrderedDict[bytes, str] = OrderedDict()

    def start(self) -> None:
        """Starts the threads and the sandbox, unless they run. They read the tokenizer first."""
        with self._lock:
            started, self._started = self._started, True
            if started:
                return
            lanes = [lane for lane in (self._sure, self._quick, self._slow) for _ in range(lane.threads)]
            self._unready = [threading.Event() for _ in lanes]
        for lane, ready in zip(lanes, self._unready, strict=True):
            threading.Thread(target=self._work, args=(lane, ready), name="grammars", daemon=True).start()

    def forget(self) -> None:
        """Frees the memory for grammars in this process, and ends the sandbox. Both are loaded again when needed."""
        self._sandbox.end_process()
        self.compiler.forget()

    def refresh(self) -> None:
        """Reads the tokenizer again in the background, unless it is loaded."""
        if self._started:
            for read in (self._sandbox.start, partial(self.compiler.compiled, _FIRST_GRAMMAR)):
                threading.Thread(target=_suppressed, args=(read,), name="grammars", daemon=True).start()

    def close(self) -> None:
        """Ends the sandbox's process. Grammars that still wait are not compiled."""
        with self._lock:
            self._started = True
        self._sandbox.close()

    @property
    def _reading(self) -> bool:
        """True while this process or the sandbox reads the tokenizer, which takes long on a busy machine."""
        return self._sandbox.reading or not all(ready.is_set() for ready in self._unready)

    @property
    def waiting(self) -> int:
        """Returns the number of grammars that wait for their turn."""
        return len(self._sure) + len(self._quick) + len(self._slow)

    def compile(
        self,
        grammar: Grammar,
        seconds: float,
        gone: Future[Any],
        size: int | None = None,
        leniency: int = 0,
        client: str = "",
    ) -> int:
        """Compiles a grammar, and returns the bytes that it may grow to; 0 if the client leaves first (`gone` is done).

        size, leniency: the result of another shard, which has tried it. client: the client's name, for fair scheduling.

        Raises InvalidGrammar with a one-line reason, and GrammarsBusy if it is not compiled within `seconds`, counted
        from the time at which the tokenizer has been read.
        """
        check_size(grammar)
        if (fault := self._known_fault(grammar)) is not None:
            raise InvalidGrammar(fault)
        if (known := self.compiler.size_of(grammar)) is not None:
            return known
        self.start()
        job, turned_away = self._join(grammar, size, leniency, client)
        if turned_away is not None:
            self._finish(turned_away, GrammarsBusy("too many grammars are waiting to be compiled; try again soon"))
        try:
            reading = True
            while reading and not (job.done.done() or gone.done()):
                reading = self._reading
                wait((job.done, gone), seconds, FIRST_COMPLETED)
        finally:
            with self._lock:
                job.waiting -= 1
        if job.done.done():
            compiled: int = job.done.result()
            return compiled
        if not gone.done():
            raise GrammarsBusy(f"the grammar was not compiled within {seconds:g} s; try again soon")
        return 0

    def _join(self, grammar: Grammar, size: int | None, leniency: int, client: str) -> tuple[_Job, _Job | None]:
        """Returns the grammar's job, and a job that is refused to make room for it, or None."""
        with self._lock:
            job, turned_away = self._running.get(grammar), None
            if job is None:
                if size is None and grammar.type is GrammarKind.JSON_SCHEMA and is_simple(grammar.value):
                    size = GROWTH_BYTES
                job = self._running[grammar] = _Job(grammar, size, leniency)
                job.clients.append(client)
                turned_away = (self._quick if size is None else self._sure).put(job)
            elif client not in job.clients:
                job.clients.append(client)
                if (lane := job.lane) is not None:
                    lane.join(job, client)
            job.waiting += 1
            return job, turned_away

    def _work(self, lane: _Lane, ready: threading.Event) -> None:
        """Compiles one grammar after another, for ever. Runs in each of the lane's threads."""
        try:
            if lane is self._sure:
                self.compiler.compiled(_FIRST_GRAMMAR)
            else:
                self._sandbox.start()
        except InvalidGrammar as error:
            logger.warning("grammars cannot be used: %s", error)
        finally:
            ready.set()
        while True:
            with lane.turn() as job:
                if not self._abandoned(job):
                    self._run(job, lane)

    def _run(self, job: _Job, lane: _Lane) -> None:
        """Compiles a grammar, or moves it to another lane."""
        try:
            self._finish(job, self._compile(job, lane))
        except NoRoomForGrammar as error:
            self._finish(job, GrammarsBusy(str(error)))
        except SandboxLimit as error:
            self._overrun(job, lane, error)
        except InvalidGrammar as error:
            self._remember(job.grammar, str(error))
            self._finish(job, error)
        except Exception as error:
            logger.exception("compiling a grammar failed; this is a bug, please report it")
            self._finish(job, InvalidGrammar(f"compiling it fails: {type(error).__name__}"))

    def _compile(self, job: _Job, lane: _Lane) -> int:
        if job.size is not None:
            source, matcher = self.compiler.compiled(job.grammar, job.leniency)
            self.compiler.cache.add(job.grammar, CompiledGrammar(source, matcher, job.size))
            return job.size
        source, size = self._sandbox.try_grammar(
            job.grammar, lane.cpu_seconds, job.leniency, niceness=lane.niceness, pay=lane.pay
        )
        self.compiler.cache.add(job.grammar, CompiledGrammar(source, self.compiler.compile(source), size))
        return size

    def _overrun(self, job: _Job, lane: _Lane, limit: SandboxLimit) -> None:
        if limit.limit == "time":
            self._finish(job, GrammarsBusy("the grammar could not be tried in time on a busy machine; try again soon"))
        elif lane is self._quick:
            turned_away = self._slow.put(job)
            if turned_away is not None:
                self._finish(turned_away, GrammarsBusy("too many large grammars are waiting; try again soon"))
        elif job.grammar.lenient and job.leniency < MOST_LENIENT:
            job.leniency += 1
            self._slow.put(job, turn_away=False)
        else:
            fault = f"compiling it takes more than {lane.cpu_seconds:g} s"
            self._remember(job.grammar, fault)
            self._finish(job, InvalidGrammar(fault))

    def _abandoned(self, job: _Job) -> bool:
        """Drops the job and returns True if no request waits for it any more."""
        with self._lock:
            if not job.waiting:
                del self._running[job.grammar]
            return not job.waiting

    def _finish(self, job: _Job, outcome: int | Exception) -> None:
        """Ends a job. outcome: bytes that the compiled grammar may grow to, or the error."""
        with self._lock:
            del self._running[job.grammar]
        if isinstance(outcome, Exception):
            job.done.set_exception(outcome)
        else:
            job.done.set_result(outcome)

    def _remember(self, grammar: Grammar, fault: str) -> None:
        with self._lock:
            self._faults[_digest(grammar)] = fault
            if len(self._faults) > _REMEMBERED_FAULTS:
                self._faults.popitem(last=False)

    def _known_fault(self, grammar: Grammar) -> str | None:
        with self._lock:
            return self._faults.get(_digest(grammar))


def _suppressed(read: Callable[[], object]) -> None:
    with suppress(InvalidGrammar):  # it was logged at the start
        read()


def _digest(grammar: Grammar) -> bytes:
    """Returns a digest that identifies a grammar, so that it need not be stored."""
    parts = (grammar.type.value, grammar.value, grammar.text, grammar.frame, *grammar.lenient)
    return hashlib.sha256(b"\0".join(part.encode(errors="surrogatepass") for part in parts)).digest()
