"""The model as the services see it: it always answers in time, if need be with nothing."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from llm_functionalities.call import Call
from llm_functionalities.deadline import Deadline
from llm_functionalities.empties import EmptyAnswers
from llm_functionalities.endpoints import Endpoints
from llm_functionalities.errors import DeadlineExceeded, ModelError
from llm_functionalities.generation import Generation
from llm_functionalities.pool import FairPool

logger = logging.getLogger(__name__)

ANSWER_FIRST_SECONDS = 0.02
"""From a deadline until the worker is stopped: workers that wake, perhaps many at once, must not delay the answer."""

WORKER_GRACE_SECONDS = 0.2
"""From a deadline until the worker stops by itself, should nobody have stopped it."""

SAID_NOTHING = "no_text"
"""The reason of an empty answer that is the model's own."""

UNUSABLE = "unusable"
"""The reason of an empty answer where the model said something that the workflow cannot use."""

T = TypeVar("T")


@dataclass(frozen=True)
class Question(Generic[T]):
    """One thing to ask the model. `prompt` is None when there is nothing to ask.

    Questions are made, and answers parsed, by the worker thread that asks: both may take milliseconds. `parse` returns
    None when it can make no use of the answer. Neither raises.
    """

    prompt: str | None
    parse: Callable[[str], T | None]

    @classmethod
    def verbatim(cls, prompt: str | None) -> "Question[str]":
        """Returns the question whose answer is taken as it is."""
        return Question(prompt, str)


@dataclass(frozen=True)
class Answer(Generic[T]):
    """`value` is None when there is none, for `reason`, which `message` tells in words; or as nothing was asked."""

    value: T | None
    reason: str | None = None
    message: str = ""

    @property
    def nothing_asked(self) -> bool:
        return self.value is None and self.reason is None

    @classmethod
    def without(cls, error: ModelError) -> "Answer[T]":
        return cls(None, error.reason, str(error))


TOO_LATE: Answer[Any] = Answer.without(DeadlineExceeded("the time was up"))


class Model:
    """Answers questions through `endpoints` on the threads of `pool`. Its methods run on the event loop."""

    def __init__(self, endpoints: Endpoints, pool: FairPool, empties: EmptyAnswers) -> None:
        self._endpoints = endpoints
        self._pool = pool
        self._empties = empties

    async def answer(
        self, ask: Callable[[], Question[T]], generation: Generation, deadline: Deadline, headers: Mapping[str, str]
    ) -> Answer[T]:
        """Returns the model's answer, at the latest when the deadline passes."""
        gathering = _Gathering[T](1, deadline, headers)
        self._pool.run(lambda: gathering.work(0, partial(self._ask, ask, generation)))
        await gathering.wait()
        return self._counted(gathering.answers)[0]

    async def answers(
        self,
        count: int,
        ask: Callable[[int], Question[T]],
        generation: Generation,
        deadline: Deadline,
        headers: Mapping[str, str],
    ) -> list[Answer[T]]:
        """Returns the answers to questions 0 to `count` - 1. The deadline holds for all of them together."""
        if not count:
            return []
        gathering = _Gathering[T](count, deadline, headers)

        def job(place: int) -> None:
            gathering.work(place, partial(self._ask, partial(ask, place), generation))

        drop_waiting = self._pool.run_batch(count, job)
        try:
            await gathering.wait()
        finally:
            drop_waiting()
        return self._counted(gathering.answers)

    async def stream(
        self, prompt: str, generation: Generation, deadline: Deadline, headers: Mapping[str, str]
    ) -> AsyncGenerator[Answer[str], None]:
        """Yields the answer in pieces; when the model fails, an empty answer with the reason ends it.

        Closing the iterator stops the generation.
        """
        loop = asyncio.get_running_loop()
        call = _call(deadline, headers)
        pieces: asyncio.Queue[Answer[str] | None] = asyncio.Queue()
        put = partial(_tell, loop, pieces.put_nowait)
        self._pool.run(lambda: self._write(prompt, generation, call, put))
        timer = loop.call_later(deadline.remaining(), pieces.put_nowait, TOO_LATE)
        end = call.cancel
        try:
            while (piece := await pieces.get()) is not None:
                if piece is TOO_LATE:
                    end = call.expire
                yield self._counted([piece])[0]
                if piece.reason is not None:
                    return
        finally:
            timer.cancel()
            end()

    def _ask(self, ask: Callable[[], Question[T]], generation: Generation, call: Call) -> Answer[T]:
        try:
            call.remaining()  # it may have waited for its thread
            question = ask()
            if question.prompt is None:
                return Answer(None)
            text = self._endpoints.generate(question.prompt, generation, call).strip()
        except ModelError as error:
            return Answer.without(error)
        if not text:
            return Answer(None, SAID_NOTHING, "the model's answer is empty")
        value = question.parse(text)
        if value is None:
            logger.debug("no use can be made of the answer %r", text)
            return Answer(None, UNUSABLE, f"no use can be made of the model's answer of {len(text)} characters")
        return Answer(value)

    def _write(
        self, prompt: str, generation: Generation, call: Call, tell: Callable[[Answer[str] | None], None]
    ) -> None:
        try:
            call.remaining()
            for text in self._endpoints.stream(prompt, generation, call):
                tell(Answer(text))
        except ModelError as error:
            tell(Answer.without(error))
        finally:
            tell(None)

    def _counted(self, answers: Sequence[Answer[T] | None]) -> list[Answer[T]]:
        whole = [TOO_LATE if answer is None else answer for answer in answers]
        for answer in whole:
            if answer.reason is not None:
                self._empties.count(answer.reason, answer.message)
        return whole


class _Gathering(Generic[T]):
    """Answers that worker threads put in their places while the event loop waits for the last of them.

    There is a `Call` only for what a worker works on, so a long batch costs little until its turn comes.
    """

    def __init__(self, size: int, deadline: Deadline, headers: Mapping[str, str]) -> None:
        self.answers: list[Answer[T] | None] = [None] * size
        self._deadline = deadline
        self._headers = headers
        self._missing = size
        self._lock = threading.Lock()
        self._calls: set[Call] = set()
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._complete = self._loop.create_future()

    def work(self, place: int, ask: Callable[[Call], Answer[T]]) -> None:
        """Puts what `ask` returns into its place. Called by a worker thread."""
        call = _call(self._deadline, self._headers)
        with self._lock:
            if self._ended:
                return  # nobody waits any more
            self._calls.add(call)
        try:
            self.answers[place] = ask(call)
        finally:
            with self._lock:
                self._calls.discard(call)
                self._missing -= 1
                complete = not self._missing
            if complete:
                _tell(self._loop, self._complete.set_result, None)

    async def wait(self) -> None:
        """Returns once all answers are there or the deadline has passed. Ends the calls that are left then."""
        end = Call.cancel
        try:
            await asyncio.wait([self._complete], timeout=max(0.0, self._deadline.remaining()))
            end = Call.expire
        finally:
            if not self._complete.done():
                self._loop.call_later(ANSWER_FIRST_SECONDS, self._end_all, end)

    def _end_all(self, end: Callable[[Call], None]) -> None:
        with self._lock:
            self._ended = True
            calls = list(self._calls)
        for call in calls:
            end(call)


def _call(deadline: Deadline, headers: Mapping[str, str]) -> Call:
    return Call(Deadline(deadline.at + WORKER_GRACE_SECONDS), headers)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *arguments: Any) -> None:
    """Calls `callback` on the loop's thread."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        return  # the loop has ended, and with it whoever waited
