"""A refusal speaks the caller's language: it names the field that was sent, and the bound that this route has."""

from typing import Any

import pytest

from tests.integration.router.conftest import Router, in_one_loop

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"prompt": "Hi"}
RESPONSE = {"input": "Hi"}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/responses": RESPONSE}


@in_one_loop
@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (
            "/v1/chat/completions",
            {"min_tokens": 9, "max_tokens": 5},
            "min_tokens",
            "`min_tokens` is 9; it must be at most `max_tokens`, which is 5",
        ),
        (
            "/v1/chat/completions",
            {"min_tokens": 9, "max_completion_tokens": 5},
            "min_tokens",
            "`min_tokens` is 9; it must be at most `max_completion_tokens`, which is 5",
        ),
        (
            "/v1/chat/completions",
            {"truncate_prompt_tokens": 0},
            "truncate_prompt_tokens",
            "`truncate_prompt_tokens` is 0; it must be 1 to 4095, or -1",
        ),
        (
            "/v1/responses",
            {"max_output_tokens": 0},
            "max_output_tokens",
            "`max_output_tokens` is 0; it must be at least 1",
        ),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens", "`max_tokens` is 0; it must be at least 1"),
        ("/v1/chat/completions", {"top_p": 2}, "top_p", "`top_p` is 2; it must be at most 1"),
        ("/v1/chat/completions", {"temperature": -1}, "temperature", "`temperature` is -1; it must be at least 0"),
        ("/v1/completions", {"prompt": [[]]}, "prompt", "`prompt` must have at least one token in each list"),
        ("/v1/completions", {"prompt": [["a"]]}, "prompt", "`prompt` must be a text, a list of texts"),
        ("/v1/responses", {"stop": ["a"] * 17}, "stop", "`stop` has 17 stop sequences; it may have at most 16"),
        ("/v1/responses", {"min_tokens": 9, "max_output_tokens": 5}, "min_tokens", "`max_output_tokens`, which is 5"),
    ],
)
async def test_the_field_and_the_bound_are_the_callers(
    shared_router: Router, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    response = await shared_router.post(path, **BODIES[path] | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@in_one_loop
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 1.0}, "`parameters.top_p` is 1.0; it must be less than 1"),
        ({"temperature": 0}, "`parameters.temperature` is 0; it must be greater than 0"),
        ({"truncate": 0}, "`parameters.truncate` is 0; it must be at least 1"),
        ({"truncate": 4096}, "`parameters.truncate` is 4096; it must be 1 to 4095"),
        ({"min_tokens": 9, "max_new_tokens": 5}, "it must be at most `parameters.max_new_tokens`, which is 5"),
    ],
)
async def test_those_of_tgi_are_tgis(shared_router: Router, fields: dict[str, Any], message: str) -> None:
    response = await shared_router.post("/generate", inputs="Hi", parameters=fields)
    assert response.status_code == 422
    assert message in response.json()["error"]
