"""Tools that are not functions to their client, as the functions that the model calls."""

import json
from typing import Any

from pydantic_core import from_json

from tgi_server.router.answers.tools import ToolSpec

_INPUT = "input"
_LARK = "x-lark"
LOCAL_SHELL = "local_shell"
_SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
    "additionalProperties": False,
}


def name_for_model(name: str, namespace: str | None) -> str:
    """Returns the name by which the model calls a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def free_form_tool(name: str, description: str | None, syntax: str | None = None, definition: str = "") -> ToolSpec:
    """Returns a tool with text input as a function with one argument.

    syntax: the syntax of the text's grammar `definition`, "regex" or "lark"; None: any text. The description has a Lark
    grammar, too.
    """
    text: dict[str, Any] = {"type": "string"}
    lines = [description] if description else []
    if syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    elif syntax is not None:
        lines.append(f"`{_INPUT}` is a text of this grammar ({syntax}):\n{definition}")
    shown = _with_input(text)
    enforced = _with_input({**text, _LARK: definition}) if syntax == "lark" else shown
    return ToolSpec(name, "\n\n".join(lines) or None, enforced, strict=True if syntax == "lark" else None, shown=shown)


def _with_input(text: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a function with one text."""
    return {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}


def free_form_arguments(text: str) -> str:
    """Returns the arguments of the function for the input `text` of the tool."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def free_form_input(arguments: str) -> str:
    """Returns the input of the tool. arguments: the function's arguments as JSON, which may be cut off."""
    found = read_arguments(arguments).get(_INPUT, "")
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def read_arguments(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call that may have been cut off."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def local_shell_tool() -> ToolSpec:
    """Returns OpenAI's tool `local_shell`, whose commands the client runs, as a function."""
    return ToolSpec(LOCAL_SHELL, "Runs a command on the user's machine and returns its output.", _SHELL_PARAMETERS)
