"""Sends questions to the model. Each one has an outcome by its deadline: an answer, or the reason why there is none."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from llm_functionalities.endpoint.balancer import Balancer, Sender
from llm_functionalities.endpoint.call import REQUEST_ID, Call, Deadline
from llm_functionalities.endpoint.endpoint import Endpoint
from llm_functionalities.endpoint.generation import GeneratedText, GenerationParameters
from llm_functionalities.endpoint.ladder import Ladders
from llm_functionalities.errors import DeadlineExceeded, ModelError, NoThread
from llm_functionalities.model.empty_responses import SAID_NOTHING, UNUSABLE, EmptyResponses
from llm_functionalities.model.pool import FairPool

logger = logging.getLogger(__name__)

# Workers are stopped this long after a deadline, so that many workers waking at once do not delay the response.
ANSWER_FIRST_SECONDS = 0.02

# A worker that is not stopped stops by itself this long after its deadline.
WORKER_GRACE_SECONDS = 0.2

# Work on text that takes no longer than this is not followed by a pause.
QUICK_SECONDS = 0.0005

NOTHING = GeneratedText("")

T = TypeVar("T")


@dataclass(frozen=True)
class Question(Generic[T]):
    """One request to the model. `prompt` is None when there is nothing to ask.

    A worker thread makes the question and parses the answer, because both may take milliseconds. Neither may raise.
    `parse` returns None for an answer that it cannot use. route: the route of the model server that gets `prompt` as
    its JSON body; None: `prompt` is a text to continue. endpoint: the endpoint to ask, without counting it as load;
    None: the balancer chooses one. It is used with a `route` only.
    """

    prompt: str | None
    parse: Callable[[str], T | None]
    route: str | None = None
    endpoint: Endpoint | None = None

    @classmethod
    def verbatim(cls, prompt: str | None) -> "Question[str]":
        """Returns a question whose value is the answer's text, without white space around it."""
        return Question(prompt, str.strip)


@dataclass(frozen=True)
class Answer(Generic[T]):
    """The outcome of a question. Without an answer `value` is None, and `reason` and `message` say why.

    When both `value` and `reason` are None, there was nothing to ask. generated: the server's response.
    """

    value: T | None
    reason: str | None = None
    message: str = ""
    generated: GeneratedText = NOTHING

    @property
    def nothing_asked(self) -> bool:
        return self.value is None and self.reason is None

    @classmethod
    def without(cls, error: ModelError) -> "Answer[T]":
        return cls(None, error.reason, str(error))


TOO_LATE: Answer[Any] = Answer.without(DeadlineExceeded("the deadline passed"))


class Model:
    """Sends questions to endpoints on the threads of `pool`. Call its methods on the event loop."""

    def __init__(
        self, balancer: Balancer, pool: FairPool, empty_responses: EmptyResponses, ladders: Ladders | None = None
    ) -> None:
        """ladders: the models that calls may name. Calls that name none go to an endpoint that `balancer` chooses."""
        self._balancer = balancer
        self._ladders = ladders
        self._pool = pool
        self._empty_responses = empty_responses
        self._batch_text = threading.Lock()

    def destinations(self, prompt: str, models: Sequence[str] = ()) -> list[Endpoint]:
        """Returns the endpoints that get prompts that begin with `prompt`: if given, those of each of `models`."""
        return self._sender(models).destinations(prompt)

    def _sender(self, models: Sequence[str]) -> Sender:
        return self._ladders.of(models) if self._ladders is not None and models else self._balancer

    async def answers(
        self,
        count: int,
        ask: Callable[[int], Question[T]],
        generation: GenerationParameters,
        deadline: Deadline,
        headers: Mapping[str, str],
        *,
        models: Sequence[str] = (),
        counted: bool = True,
    ) -> list[Answer[T]]:
        """Asks questions 0 to `count` - 1 and returns their answers in this order, by the deadline.

        A single question does not wait for the questions of batches. models: names of the models that may answer, from
        the largest to the smallest; empty: any endpoint may. counted: count missing answers as empty responses.
        """
        if not count:
            return []
        pending = _PendingAnswers[T](count, deadline, headers)
        text_work = self._turn if count > 1 else nullcontext
        sender = self._sender(models)

        def job(place: int) -> None:
            pending.work(place, partial(self._ask, sender, partial(ask, place), generation, text_work))

        drop_waiting = None
        try:
            if count > 1:
                drop_waiting = self._pool.run_batch(count, job)
            else:
                self._pool.run(partial(job, 0))
        except NoThread as error:
            return self._counted([Answer.without(error)] * count, headers, counted=counted)
        try:
            await pending.wait()
        finally:
            if drop_waiting is not None:
                drop_waiting()
        return self._counted(pending.answers, headers, counted=counted)

    async def stream(
        self,
        prompt: str,
        generation: GenerationParameters,
        deadline: Deadline,
        headers: Mapping[str, str],
        *,
        models: Sequence[str] = (),
    ) -> AsyncGenerator[Answer[str], None]:
        """Yields the answer in pieces. The last one has the finish reason, or the reason of a failure.

        Closing the iterator stops the generation. models: see `answers`.
        """
        loop = asyncio.get_running_loop()
        call = _call(deadline, headers)
        pieces: asyncio.Queue[Answer[str] | None] = asyncio.Queue()
        put = partial(_tell, loop, pieces.put_nowait)
        try:
            self._pool.run(lambda: self._write(self._sender(models), prompt, generation, call, put))
        except NoThread as error:
            yield self._counted([Answer.without(error)], headers)[0]
            return
        timer = loop.call_later(deadline.remaining(), pieces.put_nowait, TOO_LATE)
        end = call.cancel
        try:
            while (piece := await pieces.get()) is not None:
                if piece is TOO_LATE:
                    end = call.expire
                yield self._counted([piece], headers)[0]
                if piece.reason is not None:
                    return
        finally:
            timer.cancel()
            end()

    def _ask(
        self,
        sender: Sender,
        ask: Callable[[], Question[T]],
        generation: GenerationParameters,
        text_work: Callable[[], AbstractContextManager[None]],
        call: Call,
    ) -> Answer[T]:
        """text_work: returns the context manager in which the question is made and the answer is parsed."""
        try:
            with text_work():
                call.remaining()  # raises if the deadline passed while the call waited for a thread
                question = ask()
            if question.prompt is None:
                return Answer(None)
            if question.route is not None:
                if question.endpoint is None:
                    generated = sender.post(question.route, question.prompt, call)
                else:
                    generated = question.endpoint.post(question.route, question.prompt, call, counted=False)
            else:
                generated = sender.generate(question.prompt, generation, call)
        except ModelError as error:
            return Answer.without(error)
        text = generated.text
        if not text.strip():
            return Answer(None, SAID_NOTHING, "the model's answer is empty", generated)
        with text_work():
            value = question.parse(text)
        if value is None:
            extra = {"request_id": call.headers.get(REQUEST_ID, "")}
            logger.debug("the workflow cannot use the answer %r", text, extra=extra)
            message = f"the workflow cannot use the model's answer of {len(text)} characters"
            return Answer(None, UNUSABLE, message, generated)
        return Answer(value, generated=generated)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Lets one worker of a batch at a time work on text, and pauses for as long as the work took.

        The event loop needs the interpreter several times for each answer. Next to threads that compute without a
        pause, it waits for milliseconds each time.
        """
        with self._batch_text:
            begun = time.perf_counter()
            try:
                yield
            finally:
                if (took := time.perf_counter() - begun) > QUICK_SECONDS:
                    time.sleep(took)

    def _write(
        self,
        sender: Sender,
        prompt: str,
        generation: GenerationParameters,
        call: Call,
        tell: Callable[[Answer[str] | None], None],
    ) -> None:
        try:
            call.remaining()
            for piece in sender.stream(prompt, generation, call):
                tell(Answer(piece.text, generated=piece))
        except ModelError as error:
            tell(Answer.without(error))
        finally:
            tell(None)

    def _counted(
        self, answers: Sequence[Answer[T] | None], headers: Mapping[str, str], *, counted: bool = True
    ) -> list[Answer[T]]:
        whole = [TOO_LATE if answer is None else answer for answer in answers]
        for answer in whole:
            if counted and answer.reason is not None:
                self._empty_responses.count(answer.reason, answer.message, headers.get(REQUEST_ID, ""))
        return whole


class _PendingAnswers(Generic[T]):
    """Collects the answers of worker threads while the event loop waits for the last one.

    A `Call` exists only while a worker works on its question, so a long batch takes little memory.
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
        """Stores the answer that `ask` returns as number `place`. Called by a worker thread."""
        call = _call(self._deadline, self._headers)
        with self._lock:
            if self._ended:
                return  # the call has ended
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
        """Waits until all answers are there or the deadline has passed. Then ends the calls that still run."""
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
    return Call(Deadline(deadline.at + WORKER_GRACE_SECONDS), headers, due=deadline)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *arguments: Any) -> None:
    """Calls `callback` on the loop's thread. Does nothing if the loop has ended."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        return  # the loop has ended, and all its calls with it
