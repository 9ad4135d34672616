"""Regular expressions on what clients and models send take linear time; those that do not are found."""

import re

import pytest

from tools.expressions import faults, is_linear


@pytest.mark.parametrize(
    ("pattern", "methods"),
    [
        (r"!\[\]\(((?:data:|https?://)[^)\s]*)\)", {"split"}),
        (r'"(?:\\.|[^"\\])*"', {"sub"}),
        (r"\s+$", {"search"}),
        (r"a+b", {"findall"}),
        (r"a++b", {"findall"}),
        (r"<.*>", {"search"}),
        (r"(a+)+b", {"match"}),
        (r"(a*)*b", {"match"}),
        (r"(a|a)*b", {"fullmatch"}),
        (r"(?:ab|a|b)*c", {"match"}),
        (r"\w*\d*x", {"match"}),
        (r"x*[xy]*", {"fullmatch"}),
        (r"A*a*b", {"match"}),
        (r"(?:a{2,}|b)+(?=c)", {"search"}),
        (r"(?:\w+|\s+|[^\w\s])*", {"fullmatch"}),
    ],
)
def test_what_takes_more_than_linear_time_is_found(pattern, methods):
    flags = re.IGNORECASE if pattern.startswith("A") else 0
    assert not is_linear(pattern, flags, methods)


@pytest.mark.parametrize(
    ("pattern", "flags", "methods"),
    [
        (r"!\[\]\(((?:data:|https?://)[^)\s]*)(\)?)", re.IGNORECASE, {"finditer"}),
        (r"[!-~]{1,128}", 0, {"fullmatch"}),
        (r"a+b", 0, {"match"}),
        (r"^a+b", 0, {"search"}),
        (r"^[ \t]*x", re.MULTILINE, {"search"}),
        (r"(?:ab)*c", 0, {"match"}),
        (r"\w+", 0, {"findall"}),
        (r"\w+\s", 0, {"fullmatch"}),
        (r"<[^<>]*>", 0, {"sub"}),
        (rb"\d+", 0, {"findall"}),
        (r"(x(?=y*z))", 0, {"search"}),
        (r'"(?:\\.|[^"\\])*"?', 0, {"sub"}),
    ],
)
def test_what_takes_linear_time_is_accepted(pattern, flags, methods):
    assert is_linear(pattern, flags, methods)


@pytest.mark.slow
def test_those_of_the_code_take_linear_time():
    assert not list(faults())
