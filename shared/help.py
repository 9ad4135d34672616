"""The text of `--help`: a program's settings in groups, each with its variable, its values and its default."""

import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, ByteSize
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from pydantic_settings.sources.types import _CliPositionalArg

WIDTH = 100
_INDENT = " " * 6
# Characters of a list of values that stand after a flag; longer ones stand in the text.
_LONGEST_VALUES = 80
_OTHER, _REFUSED = "Other", "Not supported, unlike in TGI"
_TYPES = {bool: "", int: "NUMBER", float: "NUMBER", ByteSize: "SIZE", Path: "PATH"}


def help_text(settings: type[BaseSettings], program: str, groups: dict[str, str], refused: dict[str, str]) -> str:
    """Returns what `program --help` prints.

    groups: the title of the group that begins with each of these settings. refused: settings that are recognized and
    not supported, with the reason.
    """
    positional = [name.upper() for name, field in settings.model_fields.items() if _is_positional(field)]
    lines = [f"usage: {' '.join([program, *positional])} [--FLAG VALUE ...]", ""]
    lines += textwrap.wrap(" ".join((settings.__doc__ or "").split()), WIDTH)
    lines += ["", "A flag may also be given as the environment variable in brackets; a flag wins over a variable."]
    for title, entries in described(settings, groups, refused).items():
        lines += ["", f"{title}:"]
        for flags, variable, text in entries:
            lines.append(f"  {flags}  [{variable}]")
            lines += textwrap.wrap(
                text, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
            )
        if title == _OTHER:
            lines += ["  -h, --help", "  -V, --version"]
    return "\n".join(lines) + "\n"


def described(
    settings: type[BaseSettings], groups: dict[str, str], refused: dict[str, str]
) -> dict[str, list[tuple[str, str, str]]]:
    """Returns, by group, each setting's flags with their value, its environment variable and its description."""
    shortcuts = dict(settings.model_config.get("cli_shortcuts") or {})
    grouped: dict[str, list[tuple[str, str, str]]] = {}
    title = "Settings"
    for name, field in _own_first(settings):
        title = groups.get(name, title)
        entry = _entry(name, field, shortcuts.get(name.replace("_", "-")), refused.get(name))
        grouped.setdefault(_REFUSED if name in refused else title, []).append(entry)
    last = {title: grouped.pop(title) for title in (_OTHER, _REFUSED) if title in grouped}
    return grouped | {_OTHER: []} | last


def _own_first(settings: type[BaseSettings]) -> Iterator[tuple[str, FieldInfo]]:
    """Yields the program's own settings, then the settings that it shares with others."""
    own = [name for name in settings.model_fields if name in settings.__annotations__]
    for name in dict.fromkeys([*own, *settings.model_fields]):
        yield name, settings.model_fields[name]


def _entry(name: str, field: FieldInfo, shortcut: Any, refusal: str | None) -> tuple[str, str, str]:
    value = _values(field.annotation)
    aliases = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [name]
    flags = [f"--{str(alias).replace('_', '-')}" for alias in aliases]
    if _is_positional(field):
        flags, value = [name.upper()], ""
    elif shortcut:
        flags = [*(f"-{each}" if len(each) == 1 else f"--{each}" for each in _listed(shortcut)), *flags]
    text = refusal or field.description or ""
    if "|" in value and len(value) > _LONGEST_VALUES:
        text, value = f"{text.rstrip('.')}. One of {value.replace('|', ', ')}.", "NAME"
    text = f"{text.rstrip('.')}."
    if not re.match(r"[\w-]+:", text):  # a value, which is written as it is
        text = f"{text[:1].upper()}{text[1:]}"
    default = _default(field.default)
    if default and refusal is None and "default:" not in text.lower():
        text += f" Default: {default}."
    if field.annotation is bool and field.default is True:
        text += f" --no-{name.replace('_', '-')} turns it off."
    return f"{', '.join(flags)}{f' {value}' if value else ''}", name.upper(), text


def _listed(shortcut: Any) -> list[str]:
    return [shortcut] if isinstance(shortcut, str) else list(shortcut)


def _is_positional(field: FieldInfo) -> bool:
    return _CliPositionalArg in field.metadata


def _default(value: Any) -> str:
    """Returns a default as a user would write it; an empty text if the description has it."""
    if value is None or value == [] or isinstance(value, bool) or type(value).__name__ == "PydanticUndefinedType":
        return "" if value is not True else "on"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _values(annotation: Any) -> str:
    """Returns the values that a setting takes, such as `auto|none`, NUMBER or PATH,..."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _values(get_args(annotation)[0])
    if origin is Literal:
        return "|".join(map(str, get_args(annotation)))
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in get_args(annotation) if each is not type(None))
        return _values(inner)
    if origin is list:
        return f"{_values(typing.get_args(annotation)[0]) or 'TEXT'},..."
    return _TYPES.get(annotation, "TEXT")
