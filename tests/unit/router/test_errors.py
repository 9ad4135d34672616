"""Every error that a client is told about is one line of bounded length, with TGI's status and type."""

import pytest

from tgi_server.router import errors
from tgi_server.router.errors import ContextOverflow, InvalidTool, NoSuchRoute, RouterError, shown_message


def test_a_message_is_one_bounded_line_whatever_a_client_has_put_into_it():
    told = str(InvalidTool("the tool 'a\nb\x1b[31m' " + "x" * 5_000))
    assert "\n" not in told
    assert "\x1b" not in told
    assert len(told) < 1_100


@pytest.mark.parametrize(
    ("name", "status", "error_type"),
    [
        ("InvalidRequest", 422, "validation"),
        ("InvalidTemplate", 422, "template_error"),
        ("InvalidTool", 422, "tool_error"),
        ("Overloaded", 429, "overloaded"),
        ("GenerationFailed", 424, "generation"),
        ("IncompleteGeneration", 500, "incomplete_generation"),
        ("Unhealthy", 503, "healthcheck"),
        ("Unauthorized", 401, "unauthorized"),
    ],
)
def test_statuses_and_types_are_those_of_tgi(name: str, status: int, error_type: str):
    error = getattr(errors, name)("no")
    assert isinstance(error, RouterError)
    assert (error.status, error.error_type) == (status, error_type)


def test_a_wrong_method_keeps_the_status_that_it_was_found_with():
    assert NoSuchRoute("no such path").status == 404
    assert NoSuchRoute("not with this method", 405).status == 405


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/generate", "`inputs` must have less than 6 tokens. Given: 9"),
        ("/v1/completions", "This model's maximum context length is 5 tokens of input"),
        ("/v1/messages", "prompt is too long: 9 tokens > 5 maximum"),
    ],
)
def test_a_refusal_has_the_words_of_the_interface(path: str, words: str):
    assert shown_message(ContextOverflow.of_prompt(9, 5), path).startswith(words)
