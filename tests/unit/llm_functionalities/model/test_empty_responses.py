"""Empty responses, counted and logged."""

import logging

import pytest

from llm_functionalities.model.empty_responses import EmptyResponses


def test_each_is_counted_and_the_log_has_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[str] = []
    empty_responses = EmptyResponses(counted.append)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            empty_responses.count("deadline", "the time was up")
        empty_responses.count("unreachable", "connection refused")
    assert counted == ["deadline"] * 5 + ["unreachable"]
    assert [(record.reason, record.answers) for record in caplog.records] == [("deadline", 1), ("unreachable", 1)]


def test_the_next_line_says_how_many_there_were(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    empty_responses = EmptyResponses(lambda reason: None)
    with caplog.at_level(logging.WARNING):
        for now in (100.0, 101.0, 102.0, 106.0):  # noqa: B007
            empty_responses.count("deadline", "the time was up")
    assert [record.answers for record in caplog.records] == [1, 3]
