"""The model as services see it, with a real pool and a stand-in for a text-generation server."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import httpx2
import pytest

from llm_functionalities.endpoint.address import Address
from llm_functionalities.endpoint.balancer import Balancer
from llm_functionalities.endpoint.call import Deadline
from llm_functionalities.endpoint.endpoint import Endpoint
from llm_functionalities.endpoint.generation import GenerationParameters
from llm_functionalities.model.empty_responses import EmptyResponses
from llm_functionalities.model.model import Model, Question
from llm_functionalities.model.pool import FairPool
from tests.fakes.model_server import ModelServer
from tests.timing import SECONDS, eventually, until

GENERATION = GenerationParameters(8)


@pytest.fixture
def empty() -> list[str]:
    """The reasons of empty responses."""
    return []


@pytest.fixture
def model(server: ModelServer, http: httpx2.Client, empty: list[str]) -> Iterator[Model]:
    endpoint = Endpoint(Address.parse(server.url), http, patience=0.0)
    pool = FairPool(threads=4, batch_threads=2)
    yield Model(Balancer([endpoint]), pool, EmptyResponses(empty.append))
    pool.stop(2)
    endpoint.breaker.stop(2)


def ask(prompt: str | None = "hello") -> Callable[[int], Question[str]]:
    return lambda _: Question.verbatim(prompt)


async def test_an_answer(model: Model, empty: list[str]) -> None:
    (answer,) = await model.answers(1, ask(), GENERATION, Deadline.after(5), {})
    assert (answer.value, answer.reason) == ("a fine answer", None)
    assert empty == []


async def test_nothing_is_asked_without_a_prompt(model: Model, server: ModelServer, empty: list[str]) -> None:
    (answer,) = await model.answers(1, ask(None), GENERATION, Deadline.after(5), {})
    assert answer.nothing_asked
    assert server.requests == []
    assert empty == []


async def test_an_answer_without_use_is_told_apart_and_kept_out_of_the_log(
    model: Model, server: ModelServer, empty: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    server.answer = "a secret"
    caplog.set_level("DEBUG", "llm_functionalities")
    headers = {"x-request-id": "7"}
    (answer,) = await model.answers(
        1, lambda _: Question("x", lambda text: None), GENERATION, Deadline.after(5), headers
    )
    assert [(record.levelname, record.request_id) for record in caplog.records] == [("DEBUG", "7"), ("WARNING", "7")]
    assert (answer.value, answer.reason) == (None, "unusable")
    server.answer = " "
    (answer,) = await model.answers(1, ask(), GENERATION, Deadline.after(5), {})
    assert answer.reason == "no_text"
    assert empty == ["unusable", "no_text"]
    assert "secret" not in "\n".join(record.getMessage() for record in caplog.records if record.levelname != "DEBUG")


async def test_the_deadline_holds_for_a_whole_batch(model: Model, server: ModelServer, empty: list[str]) -> None:
    server.fault = "hang"
    started = time.monotonic()
    answers = await model.answers(50, lambda place: Question.verbatim(str(place)), GENERATION, Deadline.after(1), {})
    assert time.monotonic() - started < 5
    assert [answer.reason for answer in answers] == ["deadline"] * 50
    assert empty == ["deadline"] * 50
    until(lambda: all(request.abandoned.is_set() for request in server.requests))
    assert len(server.requests) == 2


async def test_questions_are_made_when_their_turn_comes(model: Model, server: ModelServer) -> None:
    made: list[int] = []
    may_go_on = threading.Event()

    def question(place: int) -> Question[str]:
        made.append(place)
        may_go_on.wait(SECONDS)
        return Question.verbatim(str(place))

    batch = asyncio.create_task(model.answers(20, question, GENERATION, Deadline.after(SECONDS), {}))
    await eventually(lambda: bool(made))
    await asyncio.sleep(0.1)
    assert made == [0]
    may_go_on.set()
    assert len(await batch) == 20
    assert sorted(made) == list(range(20))


async def test_calls_are_answered_empty_while_no_thread_can_be_started(
    model: Model, empty: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    deadline = Deadline.after(SECONDS)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        answers = await model.answers(1, ask(), GENERATION, deadline, {})
        answers += await model.answers(2, lambda place: Question.verbatim("x"), GENERATION, deadline, {})
        answers += [piece async for piece in model.stream("x", GENERATION, deadline, {})]
    assert [(answer.value, answer.reason) for answer in answers] == [(None, "no_thread")] * 4
    assert empty == ["no_thread"] * 4
    (answer,) = await model.answers(1, ask(), GENERATION, deadline, {})
    assert answer.value == "a fine answer"


async def test_an_empty_batch_has_no_answers(model: Model) -> None:
    assert await model.answers(0, lambda place: Question.verbatim("x"), GENERATION, Deadline.after(1), {}) == []


async def test_a_stream_that_is_closed_stops_the_generation(model: Model, server: ModelServer) -> None:
    server.answer, server.delay = " ".join(["word"] * 100), 0.02
    stream = model.stream("x", GENERATION, Deadline.after(10), {})
    assert (await anext(stream)).value == "word"
    await stream.aclose()
    assert await asyncio.to_thread(server.requests[0].abandoned.wait, 2)


async def test_a_cancelled_question_is_cancelled_at_the_server(model: Model, server: ModelServer) -> None:
    server.fault = "hang"
    task = asyncio.create_task(model.answers(1, ask(), GENERATION, Deadline.after(SECONDS), {}))
    await asyncio.to_thread(until, lambda: server.requests != [])
    task.cancel()
    assert await asyncio.to_thread(server.requests[0].abandoned.wait, 2)
