"""Messages of many entries, as bytes."""

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_functionalities.errors import InvalidArgument
from llm_functionalities.services.message_bounds import check_fields
from shared.stubs import llm_pb2
from tests.timing import on_a_busy_machine

STEP = llm_pb2.ExecutionStep(
    unique_id="1", response=llm_pb2.OutputInteraction(speech_text="Stir."), active_duration_minutes=300
)


@pytest.mark.parametrize(
    "message",
    [
        llm_pb2.ModelRequest(formatted_prompt="x" * 100_000, max_tokens=2**31 - 1, timeout=-1),
        llm_pb2.ModelBatchRequest(formatted_prompts="abc"),
        llm_pb2.ModelBatchRequest(formatted_prompts=["", "x", "\n" * 300]),
        llm_pb2.MultipleSummaryGenerationRequest(task_title=["a"] * 3, step_text=["b"] * 3, more_details=["c"] * 3),
        llm_pb2.ExecutionSearchRequest(taskmap=llm_pb2.TaskMap(title="x", steps=[STEP] * 3), user_question="y"),
    ],
)
def test_lists_up_to_the_limit_are_let_through(message: object) -> None:
    check_fields(message.SerializeToString(), message.DESCRIPTOR, 3)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (llm_pb2.ModelBatchRequest(formatted_prompts=[""] * 4), "formatted_prompts"),
        (llm_pb2.MultipleSummaryGenerationRequest(task_title=["a"], more_details=["c"] * 4), "more_details"),
        (llm_pb2.ExecutionSearchRequest(taskmap=llm_pb2.TaskMap(steps=[STEP] * 4)), r"taskmap\.steps"),
    ],
)
def test_a_longer_list_is_refused_by_its_name(message: object, field: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"`{field}` has more than 3 entries"):
        check_fields(message.SerializeToString(), message.DESCRIPTOR, 3)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (llm_pb2.ModelBatchRequest(formatted_prompts="Tell me a story."), "formatted_prompts"),
        (llm_pb2.ModelBatchRequest(formatted_prompts="\u00fcber \u20ac5 \U0001f600"), "formatted_prompts"),
        (llm_pb2.ModelBatchRequest(formatted_prompts="Once upon a time, " * 100), "formatted_prompts"),
        (llm_pb2.MultipleSummaryGenerationRequest(task_title=["a"], step_text="Stir it."), "step_text"),
    ],
)
def test_a_string_in_the_place_of_a_list_is_refused(message: object, field: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"`{field}` has \d+ entries of one character .* give a list"):
        check_fields(message.SerializeToString(), message.DESCRIPTOR, 256)


@pytest.mark.parametrize("entries", [["x"] * 200, ["", *"abcde"], [*"abcde", "fg"], ["a", "b", "c"]])
def test_short_entries_are_let_through(entries: list[str]) -> None:
    message = llm_pb2.ModelBatchRequest(formatted_prompts=entries)
    check_fields(message.SerializeToString(), message.DESCRIPTOR, 256)


def test_fields_that_nobody_knows_are_counted_too() -> None:
    with pytest.raises(InvalidArgument, match="too many fields"):
        check_fields(b"\xa0\x06\x01" * 1000, llm_pb2.ModelRequest.DESCRIPTOR, 3)


@on_a_busy_machine
def test_millions_of_entries_take_no_time() -> None:
    message = llm_pb2.ModelBatchRequest(formatted_prompts=[""] * 1_000_000).SerializeToString()
    started = time.monotonic()
    with pytest.raises(InvalidArgument):
        check_fields(message, llm_pb2.ModelBatchRequest.DESCRIPTOR, 256)
    assert time.monotonic() - started < 0.1


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_left_to_the_parser(message: bytes) -> None:
    with suppress(InvalidArgument):
        check_fields(message, llm_pb2.ExecutionSearchRequest.DESCRIPTOR, 3)
