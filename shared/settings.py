"""Settings of a process: one typed object, read once from flags and environment variables.

A setting `max_batch_size` is the flag `--max-batch-size` and the variable `MAX_BATCH_SIZE`; a flag wins over the JSON
file that `--settings-file` names, that over a variable, a variable over the default.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict, SettingsError

from shared.foreign_flags import foreign_answer
from shared.logging import parse_levels

USAGE_ERROR = 2
SECRETS = frozenset({"api_key", "endpoint_token", "hf_token"})

# If one of these is set, even to an empty value, callers need a key.
NEVER_EMPTY = frozenset({"api_key", "api_key_file"})


T = TypeVar("T")


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


# A list that is written as `1,2,4`, both on the command line and in the environment.
CommaSeparated = Annotated[list[T], BeforeValidator(_split)]


def _log_level(text: str) -> str:
    named = parse_levels(text)
    return ",".join(f"{target}={level}" if target else level for target, level in named.items())


# The least severity that is logged, in each form that TGI takes: `warn`, `info,text_generation_router=debug`.
LogLevel = Annotated[str, AfterValidator(_log_level)]

# Port 0 means none, or a free one; the setting says which.
Port = Annotated[int, Field(ge=0, le=65535)]

# How much alike names must be, from 0 to 1, for an error to suggest one for the other.
_ALIKE = 0.8


def synonyms(names: Mapping[str, str | None]) -> BeforeValidator:
    """Returns a validator that takes other names of a setting's values, as other servers have them."""
    return BeforeValidator(lambda value: names.get(value, value) if isinstance(value, str) else value)


@dataclass(frozen=True, slots=True)
class RefusedSetting:
    """Marks a setting that is known by name and not supported: `Annotated[str | None, RefusedSetting("why")]`.

    harmless: values that are let through, like the default, because they ask for nothing or for what exists.
    """

    reason: str
    harmless: tuple[object, ...] = ()


class ServiceSettings(BaseSettings):
    """Base of every process's settings."""

    model_config = SettingsConfigDict(
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_enforce_required=False,
        env_ignore_empty=True,
        enable_decoding=False,  # lists are written `1,2,4`, and no variable is JSON
        extra="forbid",
    )

    # The title of the group of `--help` that begins with each of these settings.
    help_groups: ClassVar[Mapping[str, str]] = {}

    def describe(self) -> str:
        """Returns one line of `name=value` pairs, for settings that differ from their defaults, with secrets masked."""
        fields = type(self).model_fields
        values = {
            name: "***" if name in SECRETS and value else value
            for name, value in self.model_dump(mode="json").items()
            if getattr(self, name) != fields[name].default
        }
        return " ".join(f"{name}={value}" for name, value in values.items()) or "all have their defaults"


def help_groups(settings: type[ServiceSettings]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the title of the group that begins with each of these settings, and the refused settings' reasons."""
    groups: dict[str, str] = {}
    for each in reversed(settings.__mro__):
        groups.update(vars(each).get("help_groups", {}))
    return groups, {name: mark.reason for name, mark in _marks(settings) if not mark.harmless}


class _Parser(argparse.ArgumentParser):
    """Responds to a wrong flag with one line, and to `--help` with the settings in groups."""

    def __init__(self, settings: type[ServiceSettings], program: str) -> None:
        super().__init__(prog=program, allow_abbrev=False)
        self._settings = settings

    def format_help(self) -> str:
        from shared.help import help_text  # only then

        return help_text(self._settings, self.prog, *help_groups(self._settings))

    def error(self, message: str) -> NoReturn:
        _, is_unknown, rest = message.partition("unrecognized arguments: ")
        unknown = rest.partition("=")[0].split(" ")[0]
        flags = [flag for flag in self._option_string_actions if flag.startswith("--") and not flag.startswith("--no-")]
        near = get_close_matches(unknown, flags, 1, _ALIKE) if unknown.startswith("--") else []
        if is_unknown and not unknown.startswith("-") and "model_id" in self._settings.model_fields:
            near = [f"--model-id {unknown}"]
        hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        fail(self.prog, f"{message}; {hint}")

    def refuse_foreign(self, arguments: Sequence[str]) -> None:
        """Ends the process with a line for each flag of another server that is among the arguments, if any is."""
        given = dict.fromkeys(argument.partition("=")[0] for argument in arguments)
        answers = {flag: foreign_answer(flag, self._option_string_actions) for flag in given}
        if lines := [f"there is no {flag} here; {answer}" for flag, answer in answers.items() if answer]:
            fail(self.prog, *lines)


def fail(program: str, *lines: str, status: int = USAGE_ERROR) -> NoReturn:
    """Ends the process with `program: line` on standard error for each line."""
    for line in lines:
        print(f"{program}: {line}", file=sys.stderr)
    raise SystemExit(status)


S = TypeVar("S", bound=ServiceSettings)


class InvalidSettings(ValueError):
    """Settings that were given by name are unknown, wrong or not supported."""


def check_settings(settings: type[S], values: Mapping[str, Any]) -> S:
    """Returns settings of these values alone, for a program that reads neither flags nor variables.

    Raises InvalidSettings with what is wrong with each.
    """
    unknown = []
    for name in values.keys() - settings.model_fields.keys():
        near = get_close_matches(name, settings.model_fields, 1, _ALIKE)
        hint = _foreign_setting(settings, name) or (f"did you mean `{near[0]}`?" if near else "")
        unknown.append(f"there is no setting `{name}`" + (f"; {hint}" if hint else ""))
    if unknown:
        raise InvalidSettings("; ".join(sorted(unknown)))
    try:
        result = settings.model_validate(dict(values))
    except ValidationError as error:
        raise InvalidSettings(
            "; ".join(_explain(each["loc"], each["msg"], each["input"]) for each in error.errors())
        ) from None
    if refusals := _refusals(result):
        raise InvalidSettings("; ".join(refusals))
    return result


def _foreign_setting(settings: type[S], name: str) -> str:
    """Returns what to do instead of a setting of another server; an empty text if it is not known."""
    answer = foreign_answer(_flag(name), set(map(_flag, settings.model_fields)))
    return re.sub("--([a-z-]+)( [A-Z]+)?", lambda flag: f"`{flag[1].replace('-', '_')}`", answer or "")


def read_settings(settings: type[S], program: str, arguments: Sequence[str]) -> S:
    """Reads a process's settings from `arguments` (without the program's name) and the environment.

    Raises SystemExit(2) after one line for each mistake, and for each setting that is not supported, that names the
    flag and the variable.
    """
    if {"-V", "--version"} & set(arguments):
        print(f"{program} {package_version()}")
        raise SystemExit(0)
    parser = _Parser(settings, program)
    arguments, values = _take_file(settings, program, arguments)
    try:
        source = CliSettingsSource[_Parser](settings, cli_prog_name=program, root_parser=parser)
        parser.refuse_foreign(arguments)
        result = CliApp.run(settings, cli_args=arguments, cli_settings_source=source, **values)
    except ValidationError as error:
        fail(program, *(_explain(detail["loc"], detail["msg"], detail["input"]) for detail in error.errors()))
    except SettingsError as error:
        fail(program, str(error))
    for name in sorted(NEVER_EMPTY & settings.model_fields.keys()):
        given = _given(name, arguments)
        if given is not None and not given.strip():
            fail(program, f"{_flag_and_variable(name)} is set, but empty; give it a value, or leave it out")
    if refusals := _refusals(result):
        fail(program, *refusals)
    return result


def _take_file(
    settings: type[ServiceSettings], program: str, arguments: Sequence[str]
) -> tuple[list[str], dict[str, Any]]:
    """Returns the arguments without `--settings-file=FILE`, and the settings of that file which the program has.

    The file may have settings of other programs, too. Raises SystemExit(2).
    """
    flag = "--settings-file="
    values: dict[str, Any] = {}
    for name in (argument.removeprefix(flag) for argument in arguments if argument.startswith(flag)):
        try:
            content = json.loads(Path(name).read_text(encoding="utf-8"))
            values |= {key: content[key] for key in content.keys() & settings.model_fields.keys()}
        except (OSError, ValueError, AttributeError) as error:
            fail(program, f"--settings-file: {name} is not a file with a JSON object: {error}")
    return [argument for argument in arguments if not argument.startswith(flag)], values


def _refusals(settings: ServiceSettings) -> list[str]:
    """Returns a line for each setting that was set and is not supported."""
    fields = type(settings).model_fields
    return [
        f"{_flag_and_variable(name)}: {mark.reason}"
        for name, mark in _marks(type(settings))
        if getattr(settings, name) not in (fields[name].default, *mark.harmless)
    ]


def _marks(settings: type[ServiceSettings]) -> Iterator[tuple[str, RefusedSetting]]:
    for name, field in settings.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, RefusedSetting):
                yield name, mark


def package_version() -> str:
    """Returns the version of the installed package."""
    try:
        return version("oatmill")
    except PackageNotFoundError:  # runs from a checkout that is not installed
        return "0+checkout"


def _given(name: str, arguments: Sequence[str]) -> str | None:
    """Returns a setting as it was written: by the last flag, or else by the variable; None when it was not given."""
    flag = _flag(name)
    value = os.environ.get(name.upper())
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument == flag:
            value = following
        elif argument.startswith(f"{flag}="):
            value = argument.removeprefix(f"{flag}=")
    return value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flag_and_variable(name: str) -> str:
    return f"{_flag(name)} (or {name.upper()})"


def _explain(location: tuple[int | str, ...], message: str, value: object) -> str:
    reason = message.removeprefix("Value error, ")
    if not location:
        return reason
    name = str(location[0]).replace("-", "_")
    return f"{_flag_and_variable(name)}: {reason}, got {value!r}"
