"""Requests to one text-generation server, and what becomes of its responses."""

import json
from collections.abc import Iterator

import httpx2
import pytest

from llm_functionalities.endpoint.address import Address
from llm_functionalities.endpoint.call import Call, Deadline
from llm_functionalities.endpoint.endpoint import MORE_EVENTS, Endpoint
from llm_functionalities.endpoint.generation import GeneratedText, GenerationParameters, Grammar
from llm_functionalities.errors import (
    BadResponse,
    CircuitOpen,
    ConnectionLost,
    DeadlineExceeded,
    EndpointOverloaded,
    ModelError,
    NotFound,
    NoTimeLeft,
    Rejected,
    ResponseTooLarge,
    ServerFailed,
    Unavailable,
    Unreachable,
    WrongToken,
)
from tests.fakes.model_server import ModelServer
from tests.timing import until

PLAIN = GenerationParameters(8)
GRAMMAR = GenerationParameters(8, Grammar(regex="[a-z]+"), grammar_is_optional=True)


@pytest.fixture
def endpoint(server: ModelServer, http: httpx2.Client) -> Iterator[Endpoint]:
    endpoint = Endpoint(Address.parse(server.url), http, "s3cret", interval=0.05)
    yield endpoint
    endpoint.breaker.stop(2)


def generate(endpoint: Endpoint, generation: GenerationParameters = PLAIN, seconds: float = 5) -> str:
    return endpoint.generate("hello", generation, Call(Deadline.after(seconds), {"traceparent": "00-1"})).text


def pieces(endpoint: Endpoint) -> list[str]:
    return [piece.text for piece in endpoint.stream("hello", PLAIN, Call(Deadline.after(5)))]


def test_a_request_has_the_token_and_the_trace(endpoint: Endpoint, server: ModelServer) -> None:
    assert generate(endpoint) == "a fine answer"
    (request,) = server.requests
    assert request.headers["authorization"] == "Bearer s3cret"
    assert request.headers["traceparent"] == "00-1"
    assert request.body == {
        "inputs": "hello",
        "parameters": {"max_new_tokens": 8, "return_full_text": False},
    }


def test_a_request_says_how_much_time_is_left(endpoint: Endpoint, server: ModelServer) -> None:
    generate(endpoint, seconds=40)
    (request,) = server.requests
    assert 10_000 < int(request.headers["x-envoy-expected-rq-timeout-ms"]) <= 40_000


@pytest.mark.parametrize(
    ("status", "code", "kind", "error"),
    [
        ("504 Gateway Timeout", "deadline_exceeded", "timeout", DeadlineExceeded),
        ("503 Service Unavailable", "deadline_unreachable", "overloaded", NoTimeLeft),
    ],
)
def test_a_server_that_keeps_to_the_deadline_has_not_failed(
    endpoint: Endpoint, server: ModelServer, status: str, code: str, kind: str, error: type[ModelError]
) -> None:
    server.raw, server.raw_status = json.dumps({"error": "in any words", "error_type": kind}).encode(), status
    server.headers = {"X-Error-Code": code}
    for ask in [generate, pieces, lambda endpoint: endpoint.post("/v1/decisions", "{}", Call(Deadline.after(5)))] * 3:
        with pytest.raises(error):
            ask(endpoint)
    assert endpoint.breaker.closed


def test_a_stream_that_fails_at_its_deadline_is_late(endpoint: Endpoint, server: ModelServer) -> None:
    event = {"error": "in any words", "error_type": "timeout"}
    server.raw = f"data:{json.dumps(event)}\n\n".encode()
    for seconds, error in ((60.0, ServerFailed), (0.049, DeadlineExceeded)):
        with pytest.raises(error):
            list(endpoint.stream("hello", PLAIN, Call(Deadline.after(seconds))))


def test_a_redirect_is_named(endpoint: Endpoint, server: ModelServer) -> None:
    server.raw, server.raw_status, server.headers = b"", "308 Permanent Redirect", {"location": "https://elsewhere/"}
    for ask in (generate, pieces):
        with pytest.raises(BadResponse, match=r"308.* https://elsewhere/"):
            ask(endpoint)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (429, EndpointOverloaded),
        (500, ServerFailed),
        (424, ServerFailed),
        (503, Unavailable),
        (401, WrongToken),
        (403, WrongToken),
        (404, NotFound),
        (302, BadResponse),
        (422, Rejected),
        (413, Rejected),
        (409, Rejected),
        (414, Rejected),
        (431, Rejected),
        ("garbage", BadResponse),
        ("endless", ResponseTooLarge),
        ("interim", BadResponse),
        ("reset", ConnectionLost),
        ("hang", DeadlineExceeded),
        pytest.param("trickle", DeadlineExceeded, marks=pytest.mark.slow),
    ],
)
def test_each_failure_has_its_error(
    fault: str | int, error: type[ModelError], endpoint: Endpoint, server: ModelServer
) -> None:
    server.fault, server.sick = fault, False
    with pytest.raises(error):
        generate(endpoint, seconds=1 if error is DeadlineExceeded else 10)
    assert endpoint.in_flight == 0
    assert len(server.requests) == 1


@pytest.mark.parametrize("fault", [400, 409, 413, 414, 415, 422, 431, "endless"])
@pytest.mark.parametrize("route", [None, "/v1/embeddings"])
def test_what_a_request_causes_opens_no_circuit(
    fault: str | int, route: str | None, endpoint: Endpoint, server: ModelServer
) -> None:
    server.fault, server.sick = fault, False
    send = generate if route is None else lambda endpoint: endpoint.post(route, "{}", Call(Deadline.after(10)))
    for _ in range(8):
        with pytest.raises((Rejected, ResponseTooLarge)):
            send(endpoint)
    assert endpoint.breaker.closed
    assert not endpoint.is_avoided
    server.fault = None
    assert generate(endpoint) == "a fine answer"


def test_a_server_that_is_gone_opens_the_circuit_until_it_is_back(endpoint: Endpoint, server: ModelServer) -> None:
    server.kill()
    with pytest.raises(Unreachable):
        generate(endpoint)
    with pytest.raises(CircuitOpen):
        generate(endpoint)
    server.start()
    until(lambda: endpoint.breaker.closed)
    assert generate(endpoint) == "a fine answer"


def test_an_optional_grammar_is_left_out_where_the_server_takes_none(
    endpoint: Endpoint, server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.fault = "no grammars"
    assert [generate(endpoint, GRAMMAR) for _ in range(3)] == ["a fine answer"] * 3
    assert ["grammar" in request.body["parameters"] for request in server.requests] == [True, False, False, False]
    assert sum("does not support grammars" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_with_grammars_still_takes_them(
    status: int, endpoint: Endpoint, server: ModelServer
) -> None:
    server.fault, server.sick = status, False
    with pytest.raises(ModelError):
        generate(endpoint, GRAMMAR)
    server.fault = None
    generate(endpoint, GRAMMAR)
    assert ["grammar" in request.body["parameters"] for request in server.requests] == [True, True]


@pytest.mark.parametrize("constant", ["\ud83d", float("nan")])
def test_a_grammar_that_cannot_be_sent_is_not_held_against_the_endpoint(
    constant: object, endpoint: Endpoint, server: ModelServer
) -> None:
    grammar = Grammar(json_schema={"const": constant})
    for _ in range(10):
        with pytest.raises(Rejected, match="cannot be written as JSON"):
            generate(endpoint, GenerationParameters(8, grammar))
    assert endpoint.breaker.closed
    assert server.requests == []


def test_a_stream_comes_in_pieces(endpoint: Endpoint) -> None:
    pieces = list(endpoint.stream("hello", GenerationParameters(8), Call(Deadline.after(5))))
    assert [piece.text for piece in pieces] == ["a", " fine", " answer", ""]
    assert [piece.finish_reason for piece in pieces] == ["", "", "", "eos_token"]
    assert pieces[-1] == GeneratedText("", "eos_token", 7, 3)
    assert endpoint.in_flight == 0


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, ("", 0, 0)),
        ({"x-prompt-tokens": "7", "x-generated-tokens": "3", "x-finish-reason": "length"}, ("length", 7, 3)),
        ({"x-prompt-tokens": "7", "x-generated-tokens": "3"}, ("eos_token", 7, 3)),
        ({"x-generated-tokens": "8"}, ("length", 0, 8)),
        ({"x-prompt-tokens": "many", "x-generated-tokens": "9" * 50}, ("", 0, 0)),
    ],
)
def test_a_text_comes_with_the_reason_of_its_end(
    headers: dict[str, str], expected: tuple[str, int, int], endpoint: Endpoint, server: ModelServer
) -> None:
    server.headers = headers
    text = endpoint.generate("hello", PLAIN, Call(Deadline.after(5)))
    assert text == GeneratedText("a fine answer", *expected)


def test_half_a_surrogate_pair_becomes_a_replacement_character(endpoint: Endpoint, server: ModelServer) -> None:
    server.answer = "one \ud83d two\udc00 \U0001f600"
    assert generate(endpoint) == "one \ufffd two\ufffd \U0001f600"
    assert pieces(endpoint) == ["one", " \ufffd", " two\ufffd", " \U0001f600", ""]


@pytest.mark.parametrize("answer", [5, None, ["a"]])
def test_an_answer_that_is_no_text_is_a_bad_response(answer: object, endpoint: Endpoint, server: ModelServer) -> None:
    server.raw = json.dumps([{"generated_text": answer}]).encode()
    with pytest.raises(BadResponse, match=f"is a {type(answer).__name__}, not a text"):
        generate(endpoint)
    token = {"id": 1, "text": answer, "logprob": -0.1, "special": False}
    server.raw = b"data:" + json.dumps({"token": token, "generated_text": "x", "details": None}).encode() + b"\n\n"
    with pytest.raises(BadResponse, match=f"is a {type(answer).__name__}, not a text"):
        list(endpoint.stream("hello", PLAIN, Call(Deadline.after(5))))


def events(count: int, *, end: bool) -> bytes:
    """Returns a stream of so many tokens, the last of which ends the text if `end`."""
    token = {"id": 1, "text": "a", "logprob": -0.1, "special": False}
    details = {"finish_reason": "length", "generated_tokens": count, "seed": None, "input_length": 1}
    lines = [json.dumps({"token": token, "generated_text": None, "details": None})] * (count - end)
    if end:
        lines.append(json.dumps({"token": token, "generated_text": "a", "details": details}))
    return "".join(f"data:{line}\n\n" for line in lines).encode()


def test_a_stream_has_an_event_for_each_token_and_few_more(endpoint: Endpoint, server: ModelServer) -> None:
    server.raw = events(PLAIN.max_tokens + MORE_EVENTS, end=True)
    assert len(pieces(endpoint)) == PLAIN.max_tokens + MORE_EVENTS
    server.raw = events(PLAIN.max_tokens + MORE_EVENTS + 1, end=True)
    with pytest.raises(BadResponse, match="more than 24 events for 8 tokens"):
        pieces(endpoint)
