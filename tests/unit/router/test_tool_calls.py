import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_server.router.errors import InvalidTool
from tgi_server.router.tool_calls import ToolCallReader, read_tool_call

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.text(st.sampled_from('ab}{" ,\\é'), max_size=8))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments_of_calls = st.dictionaries(st.text("abc", min_size=1, max_size=3), values, max_size=3)


@given(arguments_of_calls, st.sampled_from([None, 2]), st.integers(1, 9))
def test_however_it_is_cut_and_spaced(arguments: dict[str, Any], indent: int | None, size: int):
    text = json.dumps({"function": {"_name": "look up", **arguments}}, indent=indent)
    reader = ToolCallReader()
    pieces = [reader.feed(text[start : start + size]) for start in range(0, len(text), size)]
    assert reader.name == "look up"
    assert json.loads("".join(pieces) + reader.end()) == arguments
    assert read_tool_call(text)[0] == "look up"


def test_a_name_with_escapes():
    assert read_tool_call('{"function": {"_name": "a\\"b"}}') == ('a"b', "{}")


def test_nothing_comes_before_the_name_is_known():
    reader = ToolCallReader()
    assert reader.feed('{"function": {"_name": "cl') == ""
    assert reader.name is None
    assert reader.feed('ock", "zone": "U') == '{"zone": "U'
    assert reader.name == "clock"


def test_a_call_that_is_cut_off_gives_what_there_is():
    assert read_tool_call('{"function": {"_name": "f", "a": "x') == ("f", '{"a": "x')


def test_a_text_without_a_name_is_told():
    with pytest.raises(InvalidTool, match="max_tokens"):
        read_tool_call('{"function": {"_na')


@pytest.mark.parametrize("blank", ["}", " ", "\n}"])
def test_long_tails_take_no_longer_than_others(blank: str):
    """A search that begins anew at each of these characters would take minutes."""
    tail = blank * 200_000
    arguments = f'{{"a": "{tail}x"}}'
    text = f'{{"function": {{"_name": "f", {arguments[1:]}}}'
    assert read_tool_call(text) == ("f", arguments)
    reader = ToolCallReader()
    pieces = [reader.feed(piece) for piece in ('{"function": {"_name": "f", "a": "', *[tail] * 3, "x", '"}}')]
    assert "".join(pieces) + reader.end() == f'{{"a": "{tail * 3}x"}}'


def test_white_space_before_the_name_costs_nothing():
    reader = ToolCallReader()
    for piece in ("{", *[" " * 100] * 5_000, '"function": {"_name": "f"}}'):
        reader.feed(piece)
    assert (reader.name, reader.end()) == ("f", "")
