"""Bodies of /v1/completions have one prompt or several, and OpenAI's parameters."""

from typing import Any

import pytest
from pydantic import ValidationError

from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.validation import validate


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "hello", **fields})


def test_one_prompt_is_a_list_of_one():
    assert request().prompt.root == ["hello"]
    assert request(prompt=["hello", "world"]).prompt.root == ["hello", "world"]


@pytest.mark.parametrize("stop", ["###", ["###"]])
def test_one_stop_sequence_is_a_list_of_one(stop: Any):
    assert request(stop=stop).stop == ["###"]


@pytest.mark.parametrize(
    ("field", "value", "nothing"),
    [
        ("messages", [{"role": "user", "content": "hello"}], []),
        ("tools", [{"type": "function", "function": {"name": "f"}}], []),
        ("tool_choice", "required", "auto"),
        ("functions", [{"name": "f"}], []),
        ("top_logprobs", 2, 0),
        ("reasoning_effort", "low", "none"),
        ("chat_template_kwargs", {"enable_thinking": False}, {}),
        ("chat_template", "{{ messages }}", None),
        ("documents", [{"title": "T"}], []),
        ("include_reasoning", False, True),
        ("modalities", ["audio"], ["text"]),
        ("web_search_options", {}, None),
    ],
)
def test_what_only_chats_have_is_refused_by_name_unless_it_asks_for_nothing(field: str, value: Any, nothing: Any):
    with pytest.raises(InvalidRequest, match=f"`{field}` is not supported"):
        validate(CompletionRequest, {"prompt": "hello", field: value})
    for unset in (nothing, None):
        assert request(**{field: unset}) == request()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("prompt", prompt) for prompt in (None, [1, "a"], [True, False], [[1.0]], [[1], [True]], [1.0], True)),
        *(("n", "2"), ("n", True), ("max_tokens", -1), ("temperature", "hot")),
    ],
)
def test_a_value_of_another_type_is_refused(field: str, value: Any):
    with pytest.raises(ValidationError) as refusal:
        request(**{field: value})
    assert refusal.value.errors()[0]["loc"][0] == field
