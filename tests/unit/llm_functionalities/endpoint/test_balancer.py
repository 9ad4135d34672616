"""The choice of an endpoint for a prompt."""

from collections import Counter

import httpx2
import pytest

from llm_functionalities.endpoint.address import Address
from llm_functionalities.endpoint.balancer import Balancer
from llm_functionalities.endpoint.call import Call, Deadline
from llm_functionalities.endpoint.endpoint import Endpoint
from llm_functionalities.endpoint.generation import GenerationParameters
from llm_functionalities.errors import CircuitOpen, NoEndpoint, Unreachable

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
