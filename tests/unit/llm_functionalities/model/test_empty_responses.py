"""Empty responses, counted and logged."""

import logging

import pytest

from llm_functionalities.model.empty_responses import EmptyResponses


def test_each_is_counted_and_the_log_has_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[str] = []
    empty_responses = EmptyResponses(counted.append)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            empty_responses.count("deadline", "the deadline passed")
        empty_responses.count("unreachable", "connection refused", "7")
    assert counted == ["deadline"] * 5 + ["unreachable"]
    assert [(record.reason, record.answers) for record in caplog.records] == [("deadline", 1), ("unreachable", 1)]
    assert [getattr(record, "request_id", None) for record in caplog.records] == [None, "7"]


def test_the_next_line_says_how_many_there_were(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    empty_responses = EmptyResponses(lambda reason: None)
    with caplog.at_level(logging.WARNING):
        for now in (100.0, 101.0, 102.0, 106.0):  # noqa: B007
            empty_responses.count("deadline", "the deadline passed")
    assert [record.answers for record in caplog.records] == [1, 3]


def test_each_text_of_a_rejection_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    empty_responses = EmptyResponses(lambda reason: None)
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            empty_responses.count("rejected", f"`top_p` is {number % 3}")
        for number in range(100):
            empty_responses.count("rejected", f"there is no adapter {number}")
            empty_responses.count("deadline", f"the time of {number} was up")
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "top_p" in line] == [f"empty answer: `top_p` is {number}" for number in range(3)]
    assert sum("no adapter" in line for line in lines) == 7
    assert sum("time" in line for line in lines) == 1
