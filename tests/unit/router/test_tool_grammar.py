import json
from typing import Any

import jsonschema
import pytest

from tests.grammars import compiler_fault
from tgi_server.router.errors import InvalidTool
from tgi_server.router.schemas.chat import Tool, ToolChoice
from tgi_server.router.tool_grammar import chosen_tools, tool_grammar


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


def test_the_choice():
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
