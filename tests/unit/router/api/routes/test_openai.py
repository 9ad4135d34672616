"""Bounds, names and members that OpenAI's routes share."""

import pytest

from tgi_server.contract import FinishReason
from tgi_server.router.api.routes.openai import check_sequences, envelope, finish_reason
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.service import ModelDescription


@pytest.mark.parametrize("sequences", [0, 5])
def test_the_number_of_sequences_is_bounded(sequences: int):
    check_sequences(4, 4, "`n`")
    with pytest.raises(InvalidRequest, match=f"`n` must be 1 to 4, not {sequences}"):
        check_sequences(sequences, 4, "`n`")


def test_every_reason_has_openais_name():
    assert {finish_reason(each) for each in FinishReason} == {"length", "stop"}


def test_a_response_names_the_adapter_that_wrote_it():
    model = ModelDescription("m", ["name", "m"], None, "cpu", False, "1.0")
    assert envelope("cmpl", model, None)["model"] == "name"
    assert envelope("cmpl", model, "chef")["model"] == "chef"
    assert envelope("cmpl", model, None)["id"].startswith("cmpl-")
