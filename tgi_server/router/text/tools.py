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

# A call is one object: the name, and the arguments beside it. Where the arguments' schema says more than which members
# there are, they are a member of their own.
_BESIDE_NAME = {"type", "properties", "required", "additionalProperties"}
_ROOT_KEYWORDS = {
    *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "nullable"),
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$id", "id", "$anchor", "$dynamicAnchor"),
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
    """Returns the grammar of JSON that calls one of `tools`; or `no_tool`, unless a call is required.

    Of a tool that is not `strict`, constraints that cannot be enforced are left to the model. Raises InvalidTool.
    """
    parameters = {tool.function.name: _parameters(tool) for tool in tools}
    members = {name: _members(each) for name, each in parameters.items() if _is_list_of_members(each)}
    calls = [_call(name, beside=name in members) for name in parameters]
    if not required:
        calls.append({**_object({"_name": {"const": NO_TOOL}}), "additionalProperties": False})
    lenient = [_escaped(tool.function.name) for tool in tools if not tool.function.strict]
    return json_grammar(
        {
            "$defs": parameters,
            "definitions": members,
            "type": "object",
            "properties": {"function": {"anyOf": calls}},
            "required": ["function"],
            "additionalProperties": False,
        },
        tuple(f"#/{home}/{name}" for name in lenient for home in ("$defs", "definitions")),
    )


def _parameters(tool: Tool) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, at home under `$defs`."""
    name, parameters = tool.function.name, tool.function.arguments
    if parameters is None:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise InvalidTool(f"the parameters of the tool {name!r} must be a JSON schema of an object")
    moved: dict[str, Any] = _moved(parameters, f"#/$defs/{_escaped(name)}")
    return {"type": "object", **moved}


def _is_list_of_members(parameters: dict[str, Any]) -> bool:
    """Returns True if a schema of arguments says which members they have, and nothing more of them as a whole."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    return not _ROOT_KEYWORDS & parameters.keys() and isinstance(properties, dict) and isinstance(required, list)


def _members(parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of arguments that stand beside the name: it has room for that. Others are named only."""
    properties = parameters.get("properties", {})
    missing = {name: True for name in parameters.get("required", []) if name not in properties}
    return {
        **{keyword: value for keyword, value in parameters.items() if keyword in _BESIDE_NAME},
        "properties": {"_name": True, **properties, **missing},
        "additionalProperties": parameters.get("additionalProperties", False),
    }


def _call(name: str, *, beside: bool) -> dict[str, Any]:
    """Returns the schema of a call's members. beside: the arguments stand beside the name."""
    if beside:
        return {**_object({"_name": {"const": name}}), "allOf": [{"$ref": f"#/definitions/{_escaped(name)}"}]}
    arguments = {"$ref": f"#/$defs/{_escaped(name)}"}
    return {**_object({"_tool": {"const": name}, "_arguments": arguments}), "additionalProperties": False}


def _object(members: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an object that has these members."""
    return {"type": "object", "properties": members, "required": list(members)}


def _escaped(name: str) -> str:
    """Returns a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


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


_HEAD = re.compile(
    r'\s*\{\s*"function"\s*:\s*\{\s*(?:"_name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*(?:(?P<none>\})|,\s*(?=\S))'
    r'|"_tool"\s*:\s*(?P<tool>"(?:[^"\\]|\\.)*")\s*,\s*"_arguments"\s*:\s*(?=\S))'
)
# JSON's white space.
_BLANK = " \t\n\r"


class ToolCallReader:
    """Takes `{"function": {"_name": NAME, ...}}` piece by piece; gives the name, then the arguments as JSON text.

    The arguments are what remains of the inner object without its `_name`; or they are a member of their own:
    `{"function": {"_tool": NAME, "_arguments": ...}}`.
    """

    def __init__(self) -> None:
        self._text = ""
        self._tail = ""
        self._complete = False
        self._around = 1
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
            self.name = json.loads(head["name"] or head["tool"])
            if head["none"]:
                self._complete = True
                return "{}"
            self._around = 2 if head["tool"] else 1
            text = ("" if head["tool"] else "{") + self._text[head.end() :]
        return self._hold_back(text)

    def end(self) -> str:
        """Returns what is left of the arguments at the end of the text; they are whole if the text is."""
        tail, self._tail = self._tail.rstrip(), ""
        if not self._complete:
            for _ in range(self._around):
                tail = tail.removesuffix("}").rstrip()
        return tail

    def _hold_back(self, text: str) -> str:
        """Keeps closing braces: the last of them close what is around the arguments."""
        certain = text.rstrip(_BLANK + "}")
        if not certain:
            self._tail += text
            return ""
        held, self._tail = self._tail, text[len(certain) :]
        return held + certain
