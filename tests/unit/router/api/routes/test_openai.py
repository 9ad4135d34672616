"""Every object of a response has the same envelope."""

import json

import pytest

from tgi_server.contract import FinishReason
from tgi_server.router.api.routes.openai import Envelope, check_sequences, finish_reason
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.service import ModelDescription


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
