"""Prompts and their labelled lines."""

import pytest

from llm_functionalities.services.prompts import alpaca, is_blank, labelled, one_line, value_at, with_images


def test_the_alpaca_form() -> None:
    assert alpaca("Do it.", "with this").endswith(
        "\n\n### Instruction:\nDo it.\n\n### Input:\nwith this\n\n### Response:\n"
    )
    assert alpaca("Do it.").endswith("\n\n### Instruction:\nDo it.\n\n### Response:\n")
    assert "Input" not in alpaca("Do it.")


def test_blank_values_have_no_line() -> None:
    assert labelled(("Task", "Pancakes"), ("Step", " \n"), ("User", "Why?")) == "Task: Pancakes\nUser: Why?"


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("  two\n lines ", "two lines"),
        ("### Response:", "# Response:"),
        ("#" * 5000, "#"),
        ("see ![](data:image/png;base64,AA)", "see [](data:image/png;base64,AA)"),
        ("x" * 5000, "x" * 2000),
        (" " * 1_000_000 + "x", ""),  # nobody looks that far
    ],
)
def test_a_value_is_one_short_line(value: str, line: str) -> None:
    assert one_line(value) == line
    assert is_blank(value) is (line == "")


def test_parallel_lists_need_not_be_equally_long() -> None:
    assert [value_at(["a", "b"], place) for place in range(3)] == ["a", "b", ""]


def test_images_stand_before_the_prompt_as_markdown() -> None:
    assert with_images([b"\xff\xd8a", b"\x89PNG"], "What?") == (
        "![](data:image/jpeg;base64,/9hh)![](data:image/png;base64,iVBORw==)What?"
    )
    assert with_images([], "What?") == "What?"
