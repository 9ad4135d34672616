"""OpenAI's parameters become TGI's, and every object of a response has the same envelope."""

import json
from typing import Any

import pytest

from tests.fakes.router_service import RouterService
from tgi_server.contract import FinishReason
from tgi_server.router.api.routes.openai import Envelope, check_sequences, finish_reason, generation_parameters
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.openai import SharedParameters
from tgi_server.router.service import ModelDescription


def parameters(max_tokens: int | None = None, **fields: Any) -> Any:
    asked = SharedParameters.model_validate({"model": "m", **fields})
    return generation_parameters(asked, RouterService().service, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("fields", "sampled"),
    [({}, True), ({"temperature": 0.5}, True), ({"temperature": 0}, False), ({"temperature": 0, "top_p": 0.5}, False)],
)
def test_tokens_are_sampled_unless_the_temperature_is_0(fields: dict[str, Any], sampled: bool):
    made = parameters(**fields)
    assert made.do_sample == sampled
    assert sampled or (made.temperature, made.top_p, made.top_k) == (None, None, None)


def test_values_that_switch_a_rule_off_are_left_out():
    made = parameters(top_p=1, top_k=-1)
    assert (made.top_p, made.top_k) == (None, None)
    made = parameters(top_p=0.5, top_k=4, min_p=0.1, seed=3, stop=["x"], logit_bias={"5": 1.0})
    assert (made.top_p, made.top_k, made.min_p, made.seed, made.stop, made.logit_bias) == (
        *(0.5, 4, 0.1, 3, ["x"]),
        {"5": 1.0},
    )


def test_no_tokens_at_all_cannot_be_asked_for():
    with pytest.raises(InvalidRequest, match="`max_tokens` must be greater than 0, not 0"):
        parameters(max_tokens=0)


@pytest.mark.parametrize("sequences", [0, 5])
def test_the_number_of_sequences_is_bounded(sequences: int):
    check_sequences(4, 4, "`n`")
    with pytest.raises(InvalidRequest, match=f"`n` must be 1 to 4, not {sequences}"):
        check_sequences(sequences, 4, "`n`")


def test_every_reason_has_openais_name():
    assert {finish_reason(each) for each in FinishReason} == {"length", "stop"}


def test_all_objects_of_a_response_share_their_envelope():
    envelope = Envelope("text_completion", "cmpl", ModelDescription("m", ["m"], None, "cpu", False, "1.0"), None)
    first, last = json.loads(envelope.wrap("")), json.loads(envelope.wrap('{"index":0}', '{"total_tokens":3}'))
    assert first["choices"] == []
    assert "usage" not in first
    assert (last["choices"], last["usage"]) == ([{"index": 0}], {"total_tokens": 3})
    assert {first[key] == last[key] for key in ("id", "object", "created", "model", "system_fingerprint")} == {True}
