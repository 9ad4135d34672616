"""Bounds, names and members that OpenAI's routes share."""

from tgi_server.contract import FinishReason
from tgi_server.router.api.routes.openai import envelope, finish_reason
from tgi_server.router.service import ModelDescription


def test_every_reason_has_openais_name():
    assert {finish_reason(each) for each in FinishReason} == {"length", "stop"}


def test_a_response_names_the_adapter_that_wrote_it():
    model = ModelDescription("m", ["name", "m"], None, "cpu", False, "1.0")
    assert envelope("cmpl", model, None)["model"] == "name"
    assert envelope("cmpl", model, "chef")["model"] == "chef"
    assert envelope("cmpl", model, None)["id"].startswith("cmpl-")
