"""Bodies of /generate are TGI's: types are taken at their word, and what is unknown is let through."""

from typing import Any

import pytest
from pydantic import ValidationError

from tgi_server.router.schemas.generate import CompatGenerateRequest, GenerateParameters, GenerateRequest


def test_unknown_members_are_let_through_and_known_ones_have_defaults():
    request = GenerateRequest.model_validate({"inputs": "a", "stream": True, "parameters": {"new_in_tgi": 1}})
    assert request.parameters == GenerateParameters()
    assert request.parameters.model_dump(exclude_defaults=True) == {}
    assert CompatGenerateRequest.model_validate({"inputs": "a", "stream": True}).stream


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", "20"),
        ("max_new_tokens", 1.5),
        ("temperature", float("nan")),
        ("seed", 2**64),
        ("top_k", 2**31),
        ("stop", "###"),
        ("details", 1),
        ("logit_bias", {"5": "much"}),
        ("cache_salt", ""),
    ],
)
def test_a_value_of_another_type_or_beyond_its_bounds_is_refused(field: str, value: Any):
    with pytest.raises(ValidationError) as refusal:
        GenerateRequest.model_validate({"inputs": "a", "parameters": {field: value}})
    assert refusal.value.errors()[0]["loc"][:2] == ("parameters", field)
