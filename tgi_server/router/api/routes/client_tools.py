"""Describes Anthropic's client tools as functions. Requests have no schemas of them: Anthropic's models know these."""

from collections.abc import Mapping
from typing import Any

from tgi_server.router.answers.tools import ToolSpec

_TEXT: Mapping[str, str] = {"type": "string"}
_LINE: Mapping[str, str] = {"type": "integer"}
_RANGE: Mapping[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}


def client_tool(kind: str, name: str, strict: bool | None) -> ToolSpec:
    """Returns the function for a client tool. kind: its type, with the date of its version, such as bash_20250124."""
    family, version = kind.rsplit("_", 1)
    match family:
        case "bash":
            description, parameters = _bash()
        case "memory":
            description, parameters = _memory()
        case _:
            description, parameters = _text_editor(version)
    return ToolSpec(name, description, parameters, strict)


def _bash() -> tuple[str, dict[str, Any]]:
    return (
        "Runs a command in a bash shell and returns its output. The shell and its state stay between calls; `restart` "
        "starts it anew.",
        _object({"command": _TEXT, "restart": {"type": "boolean"}}),
    )


def _text_editor(version: str) -> tuple[str, dict[str, Any]]:
    """Returns description and parameters of the text editor. version: its date.

    Up to 2025-01 it has `undo_edit`, and up to 2025-04 the parameter of `insert` is `new_str`.
    """
    undo = ["undo_edit"] if version <= "20250124" else []
    inserted = "insert_text" if version >= "20250728" else "new_str"
    return (
        "Shows and edits text files. `view` shows a file with line numbers, or the lines in `view_range`, or a folder; "
        "`create` writes `file_text` to a new file; `str_replace` replaces `old_str`, which must occur exactly once, "
        f"by `new_str`; `insert` puts `{inserted}` after the line `insert_line`"
        + ("; `undo_edit` takes the last edit of a file back." if undo else "."),
        _object(
            {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", *undo]},
                **dict.fromkeys(("path", "file_text", "old_str", "new_str"), _TEXT),
                "insert_line": _LINE,
                inserted: _TEXT,
                "view_range": _RANGE,
            },
            "command",
            "path",
        ),
    )


def _memory() -> tuple[str, dict[str, Any]]:
    return (
        "Keeps notes in files below `/memories`, which stay between conversations. `view` shows a file or a folder; "
        "`create` writes `file_text` to a file; `str_replace` replaces `old_str` by `new_str`; `insert` puts "
        "`insert_text` after the line `insert_line`; `delete` removes `path`; `rename` moves `old_path` to `new_path`.",
        _object(
            {
                "command": {
                    "type": "string",
                    "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
                },
                **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT),
                **dict.fromkeys(("old_path", "new_path"), _TEXT),
                "insert_line": _LINE,
                "view_range": _RANGE,
            },
            "command",
        ),
    )


def _object(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }
