"""Responses are JSON as TGI and OpenAI write it, errors included."""

import json
import math
from typing import Any

import pytest
from starlette.datastructures import Headers

from shared.stubs.generate_pb2 import TopTokens
from tests.fakes.vocabularies import EOS, byte_level
from tgi_server.router.api.encoding import (
    error_response,
    event,
    known_logprob,
    named_event,
    tgi_event,
    to_json,
    top_tokens,
)
from tgi_server.router.api.encoding import timing_headers as headers_of
from tgi_server.router.errors import (
    ContextOverflow,
    GenerationFailed,
    InvalidRequest,
    InvalidTemplate,
    NoSuchModel,
    Overloaded,
    RouterError,
    Unauthorized,
    error_body,
)
from tgi_server.router.metrics import RequestTimes
from tgi_server.router.schemas.generate import Token


def as_sent(content: Any) -> Any:
    """Returns an object as a client reads it."""
    return json.loads(to_json(content))


REFUSED = InvalidRequest('"top_k" is -1, wärme')


def test_a_validation_error_reads_as_tgis():
    assert as_sent(error_body(REFUSED, "/generate")) == {
        "error": 'Input validation error: "top_k" is -1, wärme',
        "error_type": "validation",
    }
    assert as_sent(error_body(GenerationFailed("no"), "/generate")) == {"error": "no", "error_type": "generation"}


def test_an_error_below_v1_is_openais_object_too():
    told = as_sent(error_body(REFUSED, "/v1/completions"))
    assert told["error"]["message"] == '"top_k" is -1, wärme'
    assert (told["error"]["type"], told["error_type"]) == ("invalid_request_error", "validation")


@pytest.mark.parametrize(
    ("error", "status", "kind", "param"),
    [
        (InvalidRequest.at("top_p", "must be greater than 0, not 2"), 400, "invalid_request_error", "top_p"),
        (InvalidRequest("`a[3].b`: Field required; `n`: no", param="a[3].b"), 400, "invalid_request_error", "a[3].b"),
        (InvalidRequest("the request is not JSON"), 400, "invalid_request_error", None),
        (InvalidRequest("`a` and `b`", param="b"), 400, "invalid_request_error", "b"),
        (InvalidTemplate("no"), 400, "invalid_request_error", None),
        (ContextOverflow.of_prompt(9, 5), 400, "invalid_request_error", "messages"),
        (NoSuchModel("no"), 404, "invalid_request_error", None),
        (GenerationFailed("no"), 424, "generation", None),
    ],
    ids=lambda value: value.__class__.__name__ if isinstance(value, Exception) else None,
)
def test_openais_clients_get_the_status_type_and_param_that_they_look_for(
    error: RouterError, status: int, kind: str, param: str | None
):
    response = error_response(error, "/v1/chat/completions", Headers())
    told = json.loads(bytes(response.body))["error"]
    assert (response.status_code, told["type"], told["param"]) == (status, kind, param)
    assert error_response(error, "/generate", Headers()).status_code == (422 if status == 400 else status)


def test_a_stream_that_failed_early_gets_an_event_if_it_reads_events():
    reads_events = Headers({"accept": "text/event-stream"})
    response = error_response(REFUSED, "/generate_stream", reads_events)
    assert (response.status_code, response.media_type) == (422, "text/event-stream")
    assert response.body == tgi_event(error_body(REFUSED, "/generate_stream"))
    assert error_response(REFUSED, "/generate_stream", Headers({})).media_type == "application/json"
    assert error_response(REFUSED, "/generate", reads_events).media_type == "application/json"


def test_refusals_say_how_to_go_on():
    assert error_response(Overloaded("full"), "/generate", Headers({})).headers["retry-after"] == "1"
    assert error_response(Unauthorized("no"), "/generate", Headers({})).headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(-0.25, b"-0.25"), (0.1, b"0.1"), (1 / 3, b"0.33333333")],
        *[(None, b"null"), (-math.inf, b"null"), (math.nan, b"null")],
    ],
)
def test_a_logprob_that_json_cannot_say_is_null(value: float | None, text: bytes):
    assert to_json(known_logprob(value)) == text


@pytest.mark.parametrize("text", ["plain", 'q"uo\\te', "line\nend\x00", "ü🌳", "\u2028"])
def test_a_tokens_text_survives_json(text: str):
    told = as_sent(Token(id=7, text=text, logprob=-0.5, special=False))
    assert told == {"id": 7, "text": text, "logprob": -0.5, "special": False}


@pytest.mark.parametrize("character", [*map(chr, range(0x20)), "\x7f", "\x85", "\u2028", "\u2029", "\ufeff"], ids=ascii)
def test_an_event_is_one_line_for_every_reader(character: str):
    told = Token(id=7, text=f"ü{character}x", logprob=-0.5, special=False)
    for written in (event(told), tgi_event(told), named_event("token", told)):
        *_, data, end = written.decode().splitlines()
        assert end == ""
        assert json.loads(data.removeprefix("data:"))["text"] == f"ü{character}x"


def test_the_most_likely_tokens_name_special_ones():
    tokenizer = byte_level()
    (end,) = (token_id for token_id, name in tokenizer.special_tokens.items() if name == EOS)
    hello = tokenizer.encode("hello", add_special_tokens=False).ids[0]
    told = top_tokens(tokenizer, TopTokens(ids=[hello, end], logprobs=[-0.5, -1.5]))
    assert [(each.text, each.special) for each in told] == [("hello", False), (EOS, True)]


def test_times_are_told_in_milliseconds_and_the_compute_time_in_seconds():
    times = RequestTimes(total=1.5, validation=0.25, queue=0.5, inference=0.75, per_token=0.125, first_token=0.5)
    headers = headers_of("cpu", times, characters=5, prompt_tokens=3, generated_tokens=6)
    assert headers == {
        "x-compute-type": "cpu",
        "x-compute-characters": "5",
        "x-compute-time": "1.500000",
        "x-total-time": "1500",
        "x-validation-time": "250",
        "x-queue-time": "500",
        "x-inference-time": "750",
        "x-time-per-token": "125",
        "x-prompt-tokens": "3",
        "x-generated-tokens": "6",
    }
