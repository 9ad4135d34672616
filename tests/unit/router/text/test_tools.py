import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.grammars import compiler_fault
from tgi_server.router.errors import InvalidTool
from tgi_server.router.schemas.chat import Tool, ToolChoice
from tgi_server.router.text.tools import ToolCallReader, chosen_tools, tool_grammar


def tool(name: str, parameters: dict[str, Any] | None = None) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


WEATHER = tool(
    "get_weather",
    {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}, "required": ["place"]},
)
CLOCK = tool("clock")


def choice(value: Any) -> ToolChoice:
    return ToolChoice.model_validate(value)


def accepts(tools: list[Tool], answer: dict[str, Any], *, required: bool = True) -> bool:
    schema = json.loads(tool_grammar(tools, required=required).value)
    return jsonschema.Draft202012Validator(schema).is_valid({"function": answer})


def test_the_choice_among_tools_says_which_may_and_must_be_called():
    tools = [WEATHER, CLOCK]
    assert chosen_tools(tools, None) == (tools, False)
    assert chosen_tools(tools, choice("auto")) == (tools, False)
    assert chosen_tools(tools, choice("none")) == ([], False)
    assert chosen_tools(tools, choice("required")) == (tools, True)
    named = choice({"type": "function", "function": {"name": "clock"}})
    assert chosen_tools(tools, named) == ([CLOCK], True)
    assert chosen_tools(tools, choice({"function": {"name": "clock"}})) == ([CLOCK], True)
    assert chosen_tools(tools, choice("clock")) == ([CLOCK], True)
    assert chosen_tools(None, None) == ([], False)


@pytest.mark.parametrize(
    ("tools", "chosen", "fault"),
    [
        ([CLOCK], {"function": {"name": "radio"}}, "radio"),
        ([CLOCK, CLOCK], "auto", "same name"),
        ([], "required", "no `tools`"),
        ([tool("no_tool")], "auto", "no_tool"),
    ],
)
def test_choices_that_make_no_sense(tools: list[Tool], chosen: Any, fault: str):
    with pytest.raises(InvalidTool, match=fault):
        chosen_tools(tools, choice(chosen))


def test_a_call_has_the_name_and_the_arguments():
    assert accepts([WEATHER, CLOCK], {"_name": "get_weather", "place": "Paris"})
    assert accepts([WEATHER, CLOCK], {"_name": "get_weather", "place": "Paris", "days": 2})
    assert accepts([WEATHER, CLOCK], {"_name": "clock"})
    assert not accepts([WEATHER, CLOCK], {"_name": "get_weather"})
    assert not accepts([WEATHER, CLOCK], {"_name": "get_weather", "place": 3})
    assert not accepts([WEATHER, CLOCK], {"_name": "radio"})
    assert not accepts([WEATHER, CLOCK], {"_name": "clock", "place": "Paris"})


def test_no_tool_may_be_called_unless_one_must():
    assert accepts([CLOCK], {"_name": "no_tool"}, required=False)
    assert not accepts([CLOCK], {"_name": "no_tool"}, required=True)


def test_references_within_the_parameters_hold():
    parameters = {
        "type": "object",
        "properties": {"stop": {"$ref": "#/$defs/place"}, "tree": {"$ref": "#"}},
        "required": ["stop"],
        "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
    }
    travel = tool("a/b~c", parameters)
    assert accepts([travel], {"_name": "a/b~c", "stop": {"city": "Rome"}})
    assert accepts([travel], {"_name": "a/b~c", "stop": {"city": "Rome"}, "tree": {"stop": {"city": "Rome"}}})
    assert not accepts([travel], {"_name": "a/b~c", "stop": {"town": "Rome"}})


def test_the_grammar_compiles():
    assert compiler_fault(tool_grammar([WEATHER, CLOCK], required=False)) is None


def test_parameters_must_be_a_schema():
    with pytest.raises(InvalidTool, match="clock"):
        tool_grammar(
            [Tool.model_validate({"type": "function", "function": {"name": "clock", "parameters": 3}})], required=True
        )


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.text(st.sampled_from('ab}{" ,\\é'), max_size=8))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments_of_calls = st.dictionaries(st.text("abc", min_size=1, max_size=3), values, max_size=3)


def read(text: str) -> tuple[str | None, str]:
    """Returns the name and the arguments of a call that comes in one piece."""
    reader = ToolCallReader()
    arguments = reader.feed(text) + reader.end()
    return reader.name, arguments


@given(arguments_of_calls, st.sampled_from([None, 2]), st.integers(1, 9))
def test_however_it_is_cut_and_spaced(arguments: dict[str, Any], indent: int | None, size: int):
    text = json.dumps({"function": {"_name": "look up", **arguments}}, indent=indent)
    reader = ToolCallReader()
    pieces = [reader.feed(text[start : start + size]) for start in range(0, len(text), size)]
    assert reader.name == "look up"
    assert json.loads("".join(pieces) + reader.end()) == arguments


def test_a_name_with_escapes():
    assert read('{"function": {"_name": "a\\"b"}}') == ('a"b', "{}")


def test_nothing_comes_before_the_name_is_known():
    reader = ToolCallReader()
    assert reader.feed('{"function": {"_name": "cl') == ""
    assert reader.name is None
    assert reader.feed('ock", "zone": "U') == '{"zone": "U'
    assert reader.name == "clock"


def test_a_call_that_is_cut_off_gives_what_there_is():
    assert read('{"function": {"_name": "f", "a": "x') == ("f", '{"a": "x')


@pytest.mark.parametrize("blank", ["}", " ", "\n}"])
def test_long_tails_take_no_longer_than_others(blank: str):
    """A search that begins anew at each of these characters would take minutes."""
    tail = blank * 200_000
    arguments = f'{{"a": "{tail}x"}}'
    text = f'{{"function": {{"_name": "f", {arguments[1:]}}}'
    assert read(text) == ("f", arguments)
    reader = ToolCallReader()
    pieces = [reader.feed(piece) for piece in ('{"function": {"_name": "f", "a": "', *[tail] * 3, "x", '"}}')]
    assert "".join(pieces) + reader.end() == f'{{"a": "{tail * 3}x"}}'


def test_white_space_before_the_name_costs_nothing():
    reader = ToolCallReader()
    for piece in ("{", *[" " * 100] * 5_000, '"function": {"_name": "f"}}'):
        reader.feed(piece)
    assert (reader.name, reader.end()) == ("f", "")
