"""Grammars that wait to be compiled: which is first, which are refused, which are cached."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from tests import hostile_grammars as hostile
from tests.grammars import left_to_model
from tgi_server import demo_model
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.grammar import GrammarCompiler, InvalidGrammar, Sandbox
from tgi_server.grammar.sandbox import MEMORY_BYTES, Trial
from tgi_server.shard import grammar_queue
from tgi_server.shard.errors import GrammarsBusy
from tgi_server.shard.grammar_queue import GrammarQueue

SECONDS = 60.0


class Tried(Sandbox):
    """Notes what is tried. On a machine that many tests keep busy, it has no niceness; time ends before its memory."""

    def __init__(self, tried: list[Grammar]) -> None:
        super().__init__(demo_model.PATH, 3072, [1], memory_bytes=4 * MEMORY_BYTES)
        self._tried = tried

    def try_grammar(
        self, grammar: Grammar, cpu_seconds: float, leniency: int = 0, niceness: int = 0, pay: Any = None
    ) -> Any:
        self._tried.append(grammar)
        return super().try_grammar(grammar, cpu_seconds, leniency, pay=pay)


@pytest.fixture
def tried() -> list[Grammar]:
    return []


@pytest.fixture
def queue(tried: list[Grammar]) -> Iterator[GrammarQueue]:
    queue = GrammarQueue(GrammarCompiler(demo_model.PATH, 3072, [1]), Tried(tried))
    yield queue
    queue.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(200) as pool:
        yield pool


def slow(number: int) -> Grammar:
    return hostile.regex(hostile.optional_letters(100_000 + number))


def compile_now(queue: GrammarQueue, grammar: Grammar, seconds: float = SECONDS) -> int:
    return queue.compile(grammar, seconds, Future())


def test_requests_for_the_same_grammar_share_one_turn(
    queue: GrammarQueue, pool: ThreadPoolExecutor, tried: list[Grammar]
) -> None:
    grammar = hostile.schema(hostile.references(300))
    sizes = {future.result() for future in [pool.submit(compile_now, queue, grammar) for _ in range(20)]}
    assert len(sizes) == 1
    assert min(sizes) > 0
    assert tried == [grammar]
    assert compile_now(queue, grammar) in sizes
    assert tried == [grammar]


def test_before_the_first_grammar_both_processes_have_read_the_tokenizer(
    queue: GrammarQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Trial] = []
    ask = Sandbox._ask

    def note(sandbox: Sandbox, trial: Trial) -> Any:
        answer = ask(sandbox, trial)
        asked.append(trial)
        return answer

    monkeypatch.setattr(Sandbox, "_ask", note)
    queue.start()
    until(lambda: len(asked) == 3 and queue.compiler._tokenizer is not None)
    assert [trial.grammar for trial in asked] == [None] * 3  # one for each thread that has grammars tried
    queue.start()
    assert compile_now(queue, hostile.schema({"type": "integer"})) > 0
    assert len(asked) == 3


_READS_LATE = """
import runpy, sys, time
from pathlib import Path

gate = Path(sys.argv.pop(1))
while not gate.exists():
    time.sleep(0.01)
runpy.run_module("tgi_server.grammar.trial", run_name="__main__")
"""


def test_a_request_waits_while_the_tokenizer_is_read_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tried: list[Grammar]
) -> None:
    sandbox = Tried(tried)
    sandbox._command = [sys.executable, "-c", _READS_LATE, str(tmp_path / "gate"), *sandbox._command[3:]]
    queue = GrammarQueue(GrammarCompiler(demo_model.PATH, 3072, [1]), sandbox)
    passed: list[float] = []

    def on_a_busy_machine(futures: Any, seconds: float, when: str) -> Any:
        """The time passes three times before the process comes to read."""
        passed.append(seconds)
        if len(passed) == 4:
            (tmp_path / "gate").touch()
        return wait(futures, SECONDS if len(passed) == 4 else 0, when)

    monkeypatch.setattr(grammar_queue, "wait", on_a_busy_machine)
    assert queue.compile(hostile.regex("[a-z]{2}"), 10, Future()) > 0
    assert passed == [10.0] * 4
    with pytest.raises(GrammarsBusy, match="not compiled within 10 s"):
        queue.compile(slow(0), 10, Future())
    queue.close()


def test_a_sandbox_that_cannot_be_started_does_not_hold_up_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a model's folder has a tokenizer that grammars cannot be used with."""
    (tmp_path / "tokenizer.json").write_text("{}")
    queue = GrammarQueue(GrammarCompiler(tmp_path, 3072, [1]), Sandbox(tmp_path, 3072, [1]))
    queue.start()
    until(lambda: sum("grammars cannot be used" in message for message in caplog.messages) > 0)
    with pytest.raises(InvalidGrammar, match="tokenizer cannot be read"):
        compile_now(queue, hostile.regex("a"))
    queue.close()


def test_a_simple_schema_needs_no_trial(queue: GrammarQueue, pool: ThreadPoolExecutor, tried: list[Grammar]) -> None:
    simple = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    attackers = [pool.submit(compile_now, queue, slow(i), 0.1) for i in range(64)]
    assert compile_now(queue, hostile.schema(simple)) > 0
    assert hostile.schema(simple) not in tried
    assert all(isinstance(attacker.exception(), GrammarsBusy) for attacker in attackers)


@pytest.mark.slow
def test_trials_take_a_small_share_of_a_core(
    queue: GrammarQueue, pool: ThreadPoolExecutor, tried: list[Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these computes for a tenth of a second, so that the next but one is tried a second later."""
    monkeypatch.setattr(grammar_queue, "_SAVED_SECONDS", 0.0)
    compile_now(queue, hostile.regex("first"))
    for attacker in [pool.submit(compile_now, queue, slow(i), 3.0) for i in range(30)]:
        assert isinstance(attacker.exception(), GrammarsBusy | InvalidGrammar)
    assert len(tried) <= 10


def test_a_wrong_grammar_is_remembered(queue: GrammarQueue, tried: list[Grammar]) -> None:
    def refused() -> None:
        with pytest.raises(InvalidGrammar, match="too deep"):
            compile_now(queue, hostile.lark(hostile.rules(20_000)))

    refused()
    trials = len(tried)
    refused()
    assert len(tried) == trials


@pytest.mark.slow
def test_slow_grammars_do_not_keep_others_waiting(queue: GrammarQueue, pool: ThreadPoolExecutor) -> None:
    """However many of them wait. Those beyond the limit are refused, and those without a caller are not tried."""
    compile_now(queue, hostile.regex("first"))
    attackers = [pool.submit(compile_now, queue, slow(i), 2.0) for i in range(96)]
    started = time.perf_counter()
    for i in range(5):
        compile_now(queue, hostile.regex(f"[a-z]{{{i},9}}"))
    assert time.perf_counter() - started < 20
    assert {type(attacker.exception()) for attacker in attackers} <= {GrammarsBusy, InvalidGrammar}
    assert sum(isinstance(attacker.exception(), GrammarsBusy) for attacker in attackers) > 20


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_is_refused_for_good(queue: GrammarQueue, tried: list[Grammar]) -> None:
    """A grammar has a second trial, with more time, and no third."""
    for _ in range(2):
        with pytest.raises(InvalidGrammar, match="more than 2 s"):
            compile_now(queue, slow(0))
    assert tried == [slow(0)] * 2


def test_a_request_whose_client_leaves_waits_no_longer(queue: GrammarQueue, tried: list[Grammar]) -> None:
    gone: Future[None] = Future()
    gone.set_result(None)
    started = time.perf_counter()
    for i in range(40):
        assert queue.compile(slow(i), SECONDS, gone) == 0
    assert time.perf_counter() - started < 20
    assert compile_now(queue, hostile.regex("[0-9]+")) > 0
    assert len(tried) < 10


def test_a_shard_that_is_told_the_size_tries_nothing(queue: GrammarQueue, tried: list[Grammar]) -> None:
    assert queue.compile(hostile.lark(hostile.rules(2_000)), SECONDS, Future(), size=12_345) == 12_345
    assert not tried


@pytest.mark.slow
def test_a_lenient_schema_that_is_too_complex_is_taken_with_less(queue: GrammarQueue) -> None:
    condition = {"if": {"required": ["a"]}, "then": {"minProperties": 2}}
    members = {f"p{i}": {"type": "string", "pattern": hostile.optional_letters(2_000 + i)} for i in range(100)}
    schema = json.dumps({"type": "object", "properties": members, **condition})
    with pytest.raises(InvalidGrammar):
        compile_now(queue, Grammar(GrammarKind.JSON_SCHEMA, schema))
    lenient = Grammar(GrammarKind.JSON_SCHEMA, schema, lenient=("#",))
    assert compile_now(queue, lenient) > 0
    assert "pattern at #/properties/p0" in left_to_model(lenient, queue.compiler)


class Held(Sandbox):
    """Tries nothing: each trial ends when `may_end` lets it."""

    def __init__(self, tried: list[Grammar], may_end: threading.Semaphore) -> None:
        super().__init__(demo_model.PATH, 3072, [1])
        self._tried, self._may_end = tried, may_end

    def start(self) -> None:
        pass

    def try_grammar(self, grammar: Grammar, *others: Any, **options: Any) -> Any:
        self._tried.append(grammar)
        self._may_end.acquire()
        raise InvalidGrammar("tried")


@pytest.fixture
def may_end(pool: ThreadPoolExecutor) -> Iterator[threading.Semaphore]:
    semaphore = threading.Semaphore(0)
    yield semaphore
    semaphore.release(1_000)


@pytest.fixture
def held(tried: list[Grammar], may_end: threading.Semaphore) -> GrammarQueue:
    """A queue with two trials at a time."""
    return GrammarQueue(GrammarCompiler(demo_model.PATH, 3072, [1]), Held(tried, may_end))


def by(client: str, queue: GrammarQueue, grammar: Grammar) -> int:
    return queue.compile(grammar, SECONDS, Future(), client=client)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def test_clients_take_turns(
    held: GrammarQueue, pool: ThreadPoolExecutor, tried: list[Grammar], may_end: threading.Semaphore
) -> None:
    """A grammar waits for those that are tried, and for no other of another client, even if those have fewer bytes."""
    waiting = [pool.submit(by, "a", held, hostile.regex(f"[a-z]{{{i},9}}")) for i in range(2)]
    until(lambda: len(tried) == 2)
    waiting += [pool.submit(by, "a", held, hostile.regex(f"[0-9]{{{i},9}}")) for i in range(10)]
    until(lambda: held.waiting == 10)
    long = hostile.regex("long" * 100)
    waiting.append(pool.submit(by, "b", held, long))
    until(lambda: held.waiting == 11)
    may_end.release()
    until(lambda: len(tried) == 3)
    assert tried[-1] == long
    may_end.release(100)
    assert {type(each.exception()) for each in waiting} == {InvalidGrammar}


def test_a_client_with_many_grammars_has_its_own_turned_away(
    held: GrammarQueue, pool: ThreadPoolExecutor, tried: list[Grammar], may_end: threading.Semaphore
) -> None:
    waiting = [pool.submit(by, "a", held, hostile.regex(f"[a-z]{{{i},9}}")) for i in range(66)]
    until(lambda: len(tried) == 2 and held.waiting == 64)
    long = pool.submit(by, "b", held, hostile.regex("long" * 100))
    until(lambda: any(each.done() for each in waiting))
    may_end.release(100)
    assert isinstance(long.exception(), InvalidGrammar)
    assert sorted(type(each.exception()).__name__ for each in waiting) == ["GrammarsBusy"] + ["InvalidGrammar"] * 65


def test_a_grammar_of_two_clients_has_the_turn_that_comes_first(
    held: GrammarQueue, pool: ThreadPoolExecutor, tried: list[Grammar], may_end: threading.Semaphore
) -> None:
    shared = hostile.regex("shared" * 100)
    waiting = [pool.submit(by, "a", held, hostile.regex(f"[a-z]{{{i},9}}")) for i in range(12)]
    waiting.append(pool.submit(by, "a", held, shared))
    until(lambda: len(tried) == 2 and held.waiting == 11)
    waiting.append(pool.submit(by, "b", held, shared))
    until(lambda: held.waiting == 12)
    may_end.release()
    until(lambda: len(tried) == 3)
    assert tried[-1] == shared
    may_end.release(100)
    assert {type(each.exception()) for each in waiting} == {InvalidGrammar}
    assert tried.count(shared) == 1
