"""The model as the services see it: it always answers in time, if need be with nothing."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llm_functionalities.call import Call
from llm_functionalities.deadline import Deadline
from llm_functionalities.empties import EmptyAnswers
from llm_functionalities.endpoints import Endpoints
from llm_functionalities.errors import DeadlineExceeded, ModelError
from llm_functionalities.generation import Generation
from llm_functionalities.pool import FairPool

ANSWER_FIRST_SECONDS = 0.02
"""From a deadline until the worker is stopped: workers that wake, perhaps many at once, must not delay the answer."""

WORKER_GRACE_SECONDS = 0.2
"""From a deadline until the worker stops by itself, should nobody have stopped it."""

SAID_NOTHING = "no_text"
"""The reason of an empty answer that is the model's own."""


@dataclass(frozen=True)
class Answer:
    """`text` is empty when there is none, for `reason`, which `message` tells in words."""

    text: str
    reason: str | None = None
    message: str = ""

    @classmethod
    def without(cls, error: ModelError) -> "Answer":
        return cls("", error.reason, str(error))


TOO_LATE = Answer.without(DeadlineExceeded("the time was up"))


class Model:
    """Answers prompts through `endpoints` on the threads of `pool`. Its methods run on the event loop."""

    def __init__(self, endpoints: Endpoints, pool: FairPool, empties: EmptyAnswers) -> None:
        self._endpoints = endpoints
        self._pool = pool
        self._empties = empties

    async def answer(
        self, prompt: str, generation: Generation, deadline: Deadline, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """The model's answer, at the latest when the deadline passes."""
        gathering = _Gathering(1)
        call = _call(deadline, headers)
        self._pool.run(lambda: gathering.put(0, self._ask(prompt, generation, call)))
        await gathering.wait(deadline, [call])
        return self._counted(gathering.answers)[0]

    async def answers(
        self,
        prompts: Sequence[str],
        generation: Generation,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
    ) -> list[Answer]:
        """One answer for each prompt, in their order. The deadline holds for all of them together."""
        if not prompts:
            return []
        gathering = _Gathering(len(prompts))
        calls = [_call(deadline, headers) for _ in prompts]

        def job(place: int) -> Callable[[], None]:
            return lambda: gathering.put(place, self._ask(prompts[place], generation, calls[place]))

        drop_waiting = self._pool.run_batch(map(job, range(len(prompts))))
        try:
            await gathering.wait(deadline, calls)
        finally:
            drop_waiting()
        return self._counted(gathering.answers)

    async def stream(
        self, prompt: str, generation: Generation, deadline: Deadline, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Answer, None]:
        """The answer in pieces; when the model fails, an empty answer with the reason ends it.

        Closing the iterator stops the generation.
        """
        loop = asyncio.get_running_loop()
        call = _call(deadline, headers)
        pieces: asyncio.Queue[Answer | None] = asyncio.Queue()
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

    def _ask(self, prompt: str, generation: Generation, call: Call) -> Answer:
        try:
            call.remaining()  # it may have waited for its thread
            text = self._endpoints.generate(prompt, generation, call).strip()
        except ModelError as error:
            return Answer.without(error)
        return Answer(text) if text else Answer("", SAID_NOTHING, "the model's answer is empty")

    def _write(self, prompt: str, generation: Generation, call: Call, tell: Callable[[Answer | None], None]) -> None:
        try:
            call.remaining()
            for text in self._endpoints.stream(prompt, generation, call):
                tell(Answer(text))
        except ModelError as error:
            tell(Answer.without(error))
        finally:
            tell(None)

    def _counted(self, answers: Sequence[Answer | None]) -> list[Answer]:
        whole = [TOO_LATE if answer is None else answer for answer in answers]
        for answer in whole:
            if answer.reason is not None:
                self._empties.count(answer.reason, answer.message)
        return whole


class _Gathering:
    """Answers that worker threads put in their places while the event loop waits for the last of them."""

    def __init__(self, size: int) -> None:
        self.answers: list[Answer | None] = [None] * size
        self._missing = size
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._complete = self._loop.create_future()

    def put(self, place: int, answer: Answer) -> None:
        """From a worker thread."""
        self.answers[place] = answer
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        _tell(self._loop, self._complete.set_result, None)

    async def wait(self, deadline: Deadline, calls: Sequence[Call]) -> None:
        """Returns once all answers are there or the deadline has passed. Ends `calls` if they are not all there."""
        end = Call.cancel
        try:
            await asyncio.wait([self._complete], timeout=max(0.0, deadline.remaining()))
            end = Call.expire
        finally:
            if not self._complete.done():
                self._loop.call_later(ANSWER_FIRST_SECONDS, _end_all, end, calls)


def _call(deadline: Deadline, headers: Mapping[str, str] | None) -> Call:
    return Call(Deadline(deadline.at + WORKER_GRACE_SECONDS), headers)


def _end_all(end: Callable[[Call], None], calls: Sequence[Call]) -> None:
    for call in calls:
        end(call)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *arguments: Any) -> None:
    """Calls `callback` on the loop's thread."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        return  # the loop has ended, and with it whoever waited
