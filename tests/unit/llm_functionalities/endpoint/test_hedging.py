"""A request that is late goes to a second endpoint, too; what no endpoint accepts goes to the fallback."""

import threading
import time
from collections.abc import Callable, Iterator

import httpx2
import pytest

from llm_functionalities.endpoint import balancer, hedging
from llm_functionalities.endpoint.address import Address
from llm_functionalities.endpoint.balancer import Balancer
from llm_functionalities.endpoint.call import Call, Deadline
from llm_functionalities.endpoint.endpoint import Endpoint
from llm_functionalities.endpoint.generation import GenerationParameters
from llm_functionalities.endpoint.hedging import Hedging
from llm_functionalities.errors import Cancelled, DeadlineExceeded, ModelError, Rejected, ServerFailed
from tests.fakes.model_server import ModelServer
from tests.timing import SECONDS, until

PLAIN = GenerationParameters(5)
# Seconds after which a request is late, in tests of late ones and in those of ones in time.
LATE, VERY_LATE = 0.05, 1.0

Ask = Callable[[Balancer, str, Call], str]


def whole(balancer: Balancer, prompt: str, call: Call) -> str:
    return balancer.generate(prompt, PLAIN, call).text


def streamed(balancer: Balancer, prompt: str, call: Call) -> str:
    return "".join(piece.text for piece in balancer.stream(prompt, PLAIN, call))


BOTH_WAYS = pytest.mark.parametrize("ask", [whole, pytest.param(streamed, marks=pytest.mark.slow)])


class Pair:
    """Two servers with a balancer that hedges. `first` is where `prompt` goes."""

    def __init__(self, one: ModelServer, other: ModelServer, http: httpx2.Client) -> None:
        self.outcomes: list[str] = []
        endpoints = [Endpoint(Address.parse(each.url), http, patience=0.0) for each in (one, other)]
        self.endpoints = endpoints
        self.balancer = self.hedging(LATE)
        self.first, self.second = one, other
        self.prompt = next(
            prompt
            for prompt in (f"prompt {number}" for number in range(1000))
            if self.balancer.choices(prompt)[0] is endpoints[0]
        )
        one.answer, other.answer = "from the first", "from the second"
        one.sick = other.sick = False

    def hedging(self, after: float | None) -> Balancer:
        """Returns a balancer for which requests are late after so many seconds."""
        self.hedges = Hedging(after, count=self.outcomes.append)
        return Balancer(self.endpoints, hedging=self.hedges)


@pytest.fixture
def other() -> Iterator[ModelServer]:
    with ModelServer() as other:
        yield other


@pytest.fixture
def pair(server: ModelServer, other: ModelServer, http: httpx2.Client) -> Iterator[Pair]:
    made = Pair(server, other, http)
    yield made
    made.balancer.stop(2)


def call(seconds: float = SECONDS) -> Call:
    return Call(Deadline.after(seconds))


@BOTH_WAYS
def test_an_answer_in_time_is_asked_for_once(pair: Pair, ask: Ask) -> None:
    balancer = pair.hedging(VERY_LATE)
    assert ask(balancer, pair.prompt, call()) == "from the first"
    time.sleep(1.2 * VERY_LATE)
    balancer.stop(2)
    assert (len(pair.first.requests), pair.second.requests, pair.outcomes) == (1, [], [])


@BOTH_WAYS
def test_the_sooner_answer_counts_and_the_other_request_is_cancelled(pair: Pair, ask: Ask) -> None:
    pair.first.fault = "hang"
    assert ask(pair.balancer, pair.prompt, call()) == "from the second"
    assert pair.first.requests[0].abandoned.wait(5)
    until(lambda: pair.outcomes == ["won"])


@BOTH_WAYS
def test_a_second_attempt_that_comes_later_is_cancelled(pair: Pair, ask: Ask) -> None:
    pair.first.delay = 10 * LATE
    pair.second.fault = "hang"
    assert ask(pair.balancer, pair.prompt, call()) == "from the first"
    assert pair.second.requests[0].abandoned.wait(5)
    until(lambda: pair.outcomes == ["lost"])


@BOTH_WAYS
def test_a_second_attempt_that_fails_costs_nothing(pair: Pair, ask: Ask) -> None:
    pair.first.delay = 10 * LATE
    pair.second.fault = 500
    assert ask(pair.balancer, pair.prompt, call()) == "from the first"
    until(lambda: pair.outcomes == ["failed"])


@BOTH_WAYS
def test_a_first_attempt_that_fails_waits_for_the_second(pair: Pair, ask: Ask) -> None:
    pair.first.fault = "hang"
    pair.second.delay = 10 * LATE

    def fail() -> None:
        until(lambda: bool(pair.second.requests))
        pair.first.kill()

    threading.Thread(target=fail).start()
    assert ask(pair.balancer, pair.prompt, call()) == "from the second"


def test_what_fails_in_time_is_not_sent_again(pair: Pair) -> None:
    pair.first.fault = 500
    balancer = pair.hedging(VERY_LATE)
    with pytest.raises(ServerFailed):
        whole(balancer, pair.prompt, call())
    time.sleep(1.2 * VERY_LATE)
    balancer.stop(2)
    assert pair.second.requests == []


@BOTH_WAYS
def test_both_attempts_end_with_the_deadline(pair: Pair, ask: Ask) -> None:
    pair.first.fault = pair.second.fault = "hang"
    with pytest.raises(DeadlineExceeded):
        ask(pair.balancer, pair.prompt, call(VERY_LATE))
    for server in (pair.first, pair.second):
        assert server.requests[0].abandoned.wait(5)


@BOTH_WAYS
def test_both_attempts_end_with_their_caller(pair: Pair, ask: Ask) -> None:
    pair.first.fault = pair.second.fault = "hang"
    of_caller = call()
    problems: list[ModelError] = []

    def work() -> None:
        try:
            ask(pair.balancer, pair.prompt, of_caller)
        except ModelError as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: bool(pair.second.requests))
    of_caller.cancel()
    thread.join(5)
    assert [type(problem) for problem in problems] == [Cancelled]
    for server in (pair.first, pair.second):
        assert server.requests[0].abandoned.wait(5)


def test_hedges_keep_to_their_budget(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedging, "MOST_SAVED", 2.0)
    balancer = pair.hedging(LATE)
    pair.first.delay = 6 * LATE
    pair.second.fault = "hang"
    for _ in range(6):
        whole(balancer, pair.prompt, call())
    until(lambda: sorted(pair.outcomes) == ["lost"] * 2 + ["no_budget"] * 4)
    balancer.stop(2)
    assert len(pair.second.requests) == 2


def test_an_endpoint_that_is_away_gets_no_second_attempt(pair: Pair) -> None:
    pair.second.kill()
    pair.first.delay = 3 * LATE
    with pytest.raises(ModelError):
        whole(Balancer([pair.endpoints[1]]), "x", call())
    assert whole(pair.balancer, pair.prompt, call()) == "from the first"
    assert pair.outcomes == []


def test_by_the_95th_percentile_few_requests_are_late(pair: Pair) -> None:
    balancer = pair.hedging(None)
    for _ in range(32):
        whole(balancer, pair.prompt, call())
    assert pair.second.requests == []  # nothing is known yet
    pair.first.fault = "hang"
    assert whole(balancer, pair.prompt, call()) == "from the second"
    balancer.stop(2)


@pytest.mark.slow
def test_an_endpoint_that_stalls_now_and_then_makes_no_hedge_later(pair: Pair) -> None:
    balancer = pair.hedging(None)
    others = (f"prompt {number}" for number in range(1000))
    prompt = next(each for each in others if balancer.choices(each)[0] is pair.endpoints[1])
    for _ in range(29):
        whole(balancer, prompt, call())
    pair.first.delay = 1.0
    for _ in range(3):
        whole(balancer, pair.prompt, call())
    pair.outcomes.clear()
    pair.first.delay = 0.7
    assert whole(balancer, pair.prompt, call()) == "from the second"
    balancer.stop(2)


def test_an_endpoint_that_stalls_is_tried_last_until_it_does_not(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.first.fault = "hang"
    for _ in range(hedging.STALLS):
        assert whole(pair.balancer, pair.prompt, call()) == "from the second"
    firsts = [pair.balancer.choices(pair.prompt)[0] for _ in range(balancer.TRIAL_EVERY)]
    assert firsts.count(pair.endpoints[0]) == 1
    pair.first.fault = None
    monkeypatch.setattr(balancer, "TRIAL_EVERY", 1)

    def recovered() -> bool:
        whole(pair.balancer, pair.prompt, call())
        return not pair.hedges.stalls(pair.endpoints[0].name)

    until(recovered)


def test_if_all_endpoints_stall_prefixes_decide(pair: Pair) -> None:
    others = (f"prompt {number}" for number in range(1000))
    prompt = next(each for each in others if pair.balancer.choices(each)[0] is pair.endpoints[1])
    for server, each in ((pair.first, pair.prompt), (pair.second, prompt)):
        server.fault = "hang"
        for _ in range(hedging.STALLS):
            whole(pair.balancer, each, call())
        server.fault = None
    assert [pair.balancer.choices(each)[0] for each in (pair.prompt, prompt)] == pair.endpoints


@pytest.fixture
def fallen(server: ModelServer, other: ModelServer, http: httpx2.Client) -> Iterator[tuple[Balancer, list[None]]]:
    """One endpoint, `server`, and a fallback, `other`; and the requests that were sent to the fallback."""
    server.sick = other.sick = False
    other.answer = "from the fallback"
    times: list[None] = []
    endpoint, fallback = (Endpoint(Address.parse(each.url), http, patience=0.0) for each in (server, other))
    balancer = Balancer(
        [endpoint],
        hedging=Hedging(VERY_LATE, count=lambda outcome: None),
        fallback=fallback,
        count_fallback=lambda: times.append(None),
    )
    yield balancer, times
    balancer.stop(2)


@BOTH_WAYS
@pytest.mark.parametrize("fault", [429, 503, "gone"])
def test_what_no_endpoint_accepts_goes_to_the_fallback(
    fallen: tuple[Balancer, list[None]], server: ModelServer, fault: str | int, ask: Ask
) -> None:
    balancer, times = fallen
    assert ask(balancer, "prompt", call()) == "a fine answer"
    if fault == "gone":
        server.kill()
    else:
        server.fault = fault
    assert ask(balancer, "prompt", call()) == "from the fallback"
    assert len(times) == 1


@pytest.mark.parametrize(("fault", "error"), [(422, Rejected), (500, ServerFailed)])
def test_what_an_endpoint_may_have_begun_does_not_go_to_the_fallback(
    fallen: tuple[Balancer, list[None]], server: ModelServer, other: ModelServer, fault: int, error: type[ModelError]
) -> None:
    server.fault = fault
    with pytest.raises(error):
        whole(fallen[0], "prompt", call())
    assert other.requests == []


def test_a_request_that_is_late_at_the_only_endpoint_goes_to_the_fallback(
    fallen: tuple[Balancer, list[None]], server: ModelServer
) -> None:
    server.fault = "hang"
    assert whole(fallen[0], "prompt", call()) == "from the fallback"
    assert server.requests[0].abandoned.wait(5)
