"""Tools: the grammar that makes a model's answer a call of one of them, and how that call is read."""

import json
import re
from collections.abc import Sequence
from typing import Any

from tgi_server.contract import Grammar
from tgi_server.router.errors import InvalidTool
from tgi_server.router.schemas.chat import NamedTool, Tool, ToolChoice
from tgi_server.router.text.grammar import json_grammar

NO_TOOL = "no_tool"

# A call is one object: the name and the arguments. More than members cannot be asked of it.
_KNOWN_OF_ARGUMENTS = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("title", "description", "$schema", "$comment", "examples", "default"),
}

DEFAULT_TOOL_PROMPT = (
    "You may call one of the functions above. Answer with JSON only: the name of the function that fits best, "
    "and its arguments, each with a value of its own and no placeholders."
)


def chosen_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> tuple[Sequence[Tool], bool]:
    """Returns the tools that this answer may call, and whether it must call one.

    Raises InvalidTool for a choice that names no tool, or tools that cannot be told apart.
    """
    wanted = choice.root if choice is not None else "auto"
    if wanted == "none" or (wanted == "auto" and not tools):
        return [], False
    tools = tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidTool("two `tools` have the same name")
    if NO_TOOL in names:
        raise InvalidTool(f"a tool must not be named {NO_TOOL!r}")
    if isinstance(wanted, NamedTool):
        named = [tool for tool in tools if tool.function.name == wanted.function.name]
        if not named:
            raise InvalidTool(f"`tool_choice` names {wanted.function.name!r}, which is none of the `tools`")
        return named, True
    if not tools:
        raise InvalidTool("`tool_choice` is `required`, and there are no `tools`")
    return tools, wanted == "required"


def tool_grammar(tools: Sequence[Tool], *, required: bool) -> Grammar:
    """Returns the grammar of JSON that calls one of `tools`; or `no_tool`, unless a call is required."""
    functions = {tool.function.name: _parameters(tool) for tool in tools}
    calls = [_call(name, parameters) for name, parameters in functions.items()]
    if not required:
        calls.append(_call(NO_TOOL, {}))
    return json_grammar(
        {
            "$defs": functions,
            "type": "object",
            "properties": {"function": {"anyOf": calls}},
            "required": ["function"],
            "additionalProperties": False,
        }
    )


def _parameters(tool: Tool) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, at home under `$defs`."""
    name, parameters = tool.function.name, tool.function.arguments
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidTool(f"the parameters of the tool {name!r} must be a JSON schema of an object")
    unknown = sorted(set(parameters) - _KNOWN_OF_ARGUMENTS)
    if unknown:
        raise InvalidTool(f"{unknown[0]!r} is not supported at the top of a tool's parameters ({name!r})")
    moved: dict[str, Any] = _moved(parameters, f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}")
    return moved


def _call(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a call's members: the name first, then the arguments."""
    properties = parameters.get("properties")
    required = parameters.get("required")
    return {
        "type": "object",
        "properties": {
            "_name": {"const": name},
            **(properties if isinstance(properties, dict) else {}),
        },
        "required": ["_name", *(required if isinstance(required, list) else [])],
        "additionalProperties": parameters.get("additionalProperties") is True,
    }


def _moved(schema: Any, root: str) -> Any:
    """Returns `schema` with references to its own document (`#/$defs/...`) led to where that document now is."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference.removeprefix("#")
    return moved


_HEAD = re.compile(r'\s*\{\s*"function"\s*:\s*\{\s*"_name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(?:(\})|,\s*(?=\S))')
# JSON's white space.
_BLANK = " \t\n\r"


class ToolCallReader:
    """Takes `{"function": {"_name": NAME, ...}}` piece by piece; gives the name, then the arguments as JSON text.

    The arguments are what remains of the inner object without its `_name`.
    """

    def __init__(self) -> None:
        self._text = ""
        self._tail = ""
        self._complete = False
        self.name: str | None = None

    def feed(self, text: str) -> str:
        """Returns the next piece of the arguments."""
        if self._complete:
            return ""
        if self.name is None:
            self._text += text
            if not text.strip(_BLANK):  # completes nothing; a model may write a lot of it
                return ""
            head = _HEAD.match(self._text)
            if head is None:
                return ""
            self.name = json.loads(head[1])
            if head[2]:
                self._complete = True
                return "{}"
            text = "{" + self._text[head.end() :]
        return self._hold_back(text)

    def end(self) -> str:
        """Returns what is left of the arguments at the end of the text; they are whole if the text is."""
        tail, self._tail = self._tail.rstrip(), ""
        return tail if self._complete else tail.removesuffix("}").rstrip()

    def _hold_back(self, text: str) -> str:
        """Keeps closing braces: the last of them closes what is around the arguments."""
        certain = text.rstrip(_BLANK + "}")
        if not certain:
            self._tail += text
            return ""
        held, self._tail = self._tail, text[len(certain) :]
        return held + certain
