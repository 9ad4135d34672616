"""The choice of an endpoint for a prompt, and of another one where nothing was generated."""

from collections import Counter
from collections.abc import Iterator

import httpx2
import pytest

from llm_functionalities.endpoint.address import Address
from llm_functionalities.endpoint.balancer import Balancer
from llm_functionalities.endpoint.call import Call, Deadline
from llm_functionalities.endpoint.endpoint import Endpoint
from llm_functionalities.endpoint.generation import GenerationParameters
from llm_functionalities.errors import (
    CircuitOpen,
    EndpointOverloaded,
    ModelError,
    NoEndpoint,
    ServerFailed,
    Unreachable,
    WrongToken,
)
from tests.fakes.model_server import ModelServer
from tests.timing import until

PLAIN = GenerationParameters(5)
NAMES = ["a:80", "b:80", "c:80"]


@pytest.fixture
def three() -> list[Endpoint]:
    client = httpx2.Client()
    return [Endpoint(Address.parse(name), client, patience=0.0, interval=3600) for name in NAMES]


def first(balancer: Balancer, prompt: str) -> str:
    return balancer.choices(prompt)[0].name


def test_prompts_that_begin_alike_go_to_the_same_endpoint(three: list[Endpoint]) -> None:
    balancer = Balancer(three)
    for conversation in range(20):
        beginning = f"conversation {conversation} " * 40
        assert len({first(balancer, beginning + str(turn)) for turn in range(10)}) == 1


def test_a_conversation_stays_where_most_of_it_was_sent_unless_that_is_much_busier(
    three: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    balancer = Balancer(three)
    loads: Counter[str] = Counter()
    monkeypatch.setattr(Endpoint, "in_flight", property(lambda endpoint: loads[endpoint.name]))
    system = "You are a helpful assistant, and this is what you know. " * 20
    chats = [f"{system} conversation {number} " * 3 for number in range(6)]
    for chat in chats:
        (chosen,) = balancer.destinations(chat)
        loads[chosen.name] += 2
    loads.clear()
    homes = [first(balancer, chat) for chat in chats]
    assert len(set(homes)) > 1  # what they share is on the first endpoint, until that is too busy
    for turn in range(3):
        assert [first(balancer, chat + " and a turn more" * turn) for chat in chats] == homes
    loads[homes[0]] = 4
    assert first(balancer, chats[0]) == homes[0]
    loads[homes[0]] = 5
    assert first(balancer, chats[0]) != homes[0]


def test_other_prompts_spread_evenly(three: list[Endpoint]) -> None:
    balancer = Balancer(three)
    counts = Counter(first(balancer, f"prompt {number}") for number in range(3000))
    assert all(800 < count < 1200 for count in counts.values()), counts


def test_the_order_of_the_list_does_not_matter(three: list[Endpoint]) -> None:
    one, other = Balancer(three), Balancer(three[::-1])
    assert all(first(one, f"prompt {number}") == first(other, f"prompt {number}") for number in range(50))


def test_a_popular_beginning_is_bounded_by_load(three: list[Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    balancer = Balancer(three)
    loads: Counter[str] = Counter()
    monkeypatch.setattr(Endpoint, "in_flight", property(lambda endpoint: loads[endpoint.name]))
    for _ in range(90):
        loads[first(balancer, "the same prompt")] += 1
    assert max(loads.values()) <= 1.25 * 30 + 1
    assert len(loads) == 3


def test_an_endpoint_that_is_away_comes_last(three: list[Endpoint]) -> None:
    balancer = Balancer(three)
    favourite = balancer.choices("prompt")[0]
    favourite.breaker.unreachable(Unreachable("refused"))
    assert balancer.choices("prompt")[-1] is favourite
    others = [f"prompt {number}" for number in range(100)]
    assert all(balancer.choices(prompt)[0] is not favourite for prompt in others)
    favourite.breaker.stop(1)


def test_what_nobody_can_answer_tells_why(three: list[Endpoint]) -> None:
    call = Call(Deadline.after(1))
    with pytest.raises(NoEndpoint, match="INFERENCE_ENDPOINT_URL"):
        Balancer([]).generate("prompt", GenerationParameters(5), call)
    for endpoint in three:
        endpoint.breaker.unreachable(Unreachable("refused"))
    with pytest.raises(CircuitOpen, match="refused"):
        Balancer(three).generate("prompt", GenerationParameters(5), call)
    Balancer(three).stop(1)


@pytest.fixture
def other() -> Iterator[ModelServer]:
    with ModelServer() as other:
        yield other


@pytest.fixture
def pair(server: ModelServer, other: ModelServer, http: httpx2.Client) -> Iterator[Balancer]:
    """Two endpoints that say that they are healthy, whatever happens to requests."""
    server.sick = other.sick = False
    endpoints = [Endpoint(Address.parse(each.url), http, interval=0.2, tolerance=3) for each in (server, other)]
    yield Balancer(endpoints)
    for endpoint in endpoints:
        endpoint.breaker.stop(2)


def answers(balancer: Balancer, count: int) -> list[str]:
    """What each of many prompts gets: its answer, or the name of its error."""

    def answer(number: int) -> str:
        try:
            if number % 2:
                pieces = balancer.stream(f"prompt {number}", PLAIN, Call(Deadline.after(5)))
                return "".join(piece.text for piece in pieces)
            return balancer.generate(f"prompt {number}", PLAIN, Call(Deadline.after(5))).text
        except ModelError as error:
            return type(error).__name__

    return [answer(number) for number in range(count)]


def test_an_endpoint_that_is_gone_loses_no_call(pair: Balancer, server: ModelServer) -> None:
    assert set(answers(pair, 20)) == {"a fine answer"}
    server.kill()
    assert set(answers(pair, 20)) == {"a fine answer"}


@pytest.mark.parametrize("status", [401, 403, 404, 429, 503])
def test_what_one_endpoint_refuses_the_other_gets(status: int, pair: Balancer, server: ModelServer) -> None:
    server.fault = status
    assert set(answers(pair, 40)) == {"a fine answer"}
    assert 3 <= len(server.requests) < 10  # the failures that are tolerated, and some after a while


@pytest.mark.parametrize("fault", [424, 500, "garbage", "reset"])
def test_what_one_endpoint_may_have_begun_is_not_sent_to_the_other(
    fault: str | int, pair: Balancer, server: ModelServer, other: ModelServer
) -> None:
    server.fault = fault
    failures = [answer for answer in answers(pair, 40) if answer != "a fine answer"]
    assert 3 <= len(failures) == len(server.requests) < 10
    assert len(server.requests) + len(other.requests) == 40


def test_an_endpoint_that_fails_again_and_again_gets_ever_fewer_calls(pair: Balancer, server: ModelServer) -> None:
    server.fault = 500
    until(lambda: answers(pair, 10) != [] and len(server.requests) >= 5, 20)
    ejected = [endpoint for endpoint in pair.choices("prompt") if endpoint.is_avoided]
    assert [endpoint.name for endpoint in ejected] == [server.url]
    server.fault = None
    before = len(server.requests)
    until(lambda: set(answers(pair, 10)) == {"a fine answer"} and len(server.requests) > before + 2, 20)


def test_a_stream_that_has_begun_goes_nowhere_else(pair: Balancer, server: ModelServer, other: ModelServer) -> None:
    token = b'{"token":{"id":1,"text":"a","logprob":-0.1,"special":false},"generated_text":null,"details":null}'
    server.raw = other.raw = b"data:" + token + b'\n\ndata:{"error":"busy","error_type":"overloaded"}\n\n'
    stream = pair.stream("prompt", PLAIN, Call(Deadline.after(5)))
    assert next(stream).text == "a"
    with pytest.raises(EndpointOverloaded, match="busy"):
        next(stream)
    assert len(server.requests) + len(other.requests) == 1


def test_a_refusal_is_reported_rather_than_that_the_other_is_gone(
    pair: Balancer, server: ModelServer, other: ModelServer
) -> None:
    server.fault = 401
    other.kill()
    for number in range(10):
        with pytest.raises(ModelError) as error:
            pair.generate(f"prompt {number}", PLAIN, Call(Deadline.after(5)))
        assert isinstance(error.value, WrongToken if number < 3 else WrongToken | CircuitOpen)


def test_the_only_endpoint_is_asked_again_as_soon_as_it_is_healthy(server: ModelServer, http: httpx2.Client) -> None:
    server.fault, server.sick = 500, False
    endpoint = Endpoint(Address.parse(server.url), http, interval=0.1, tolerance=3)
    balancer = Balancer([endpoint])
    for expected in (5, 6, 7):
        until(lambda: answers(balancer, 2) != [] and len(server.requests) >= expected, 10)  # noqa: B023
    with pytest.raises((ServerFailed, CircuitOpen)):
        balancer.generate("prompt", PLAIN, Call(Deadline.after(5)))
    server.fault = None
    assert until(lambda: "a fine answer" in answers(balancer, 1)) < 2
    endpoint.breaker.stop(2)
