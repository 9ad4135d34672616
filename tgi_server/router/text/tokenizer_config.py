"""Reads special tokens and chat templates of a model's folder, mainly from `tokenizer_config.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tgi_server.router.errors import StartupError

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
_GENERIC_CLASS = "PreTrainedTokenizerFast"  # of a tokenizer.json without a class of its own
# Names of tokens, which are also variables of chat templates, as in `transformers`.
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The parts of `tokenizer_config.json` that serving needs.

    chat_templates: Jinja sources by name; most models have one, named "default". tokens: texts of tokens, by their
    names in TOKEN_NAMES. add_bos_token, add_eos_token: None leaves it to `tokenizer.json`. response_template: the
    file's description of how to parse answers, or None. tokenizer_class: name of the class in `transformers`.
    """

    tokens: Mapping[str, str] = field(default_factory=dict)
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    response_template: Any = None
    tokenizer_class: str = _GENERIC_CLASS

    @property
    def bos_token(self) -> str | None:
        return self.tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.tokens.get("eos_token")


def read_tokenizer_config(model: Path, override: Path | None) -> TokenizerConfig:
    """Reads the model folder's files; `override` (`--tokenizer-config-path`) replaces `tokenizer_config.json`.

    `override` may also be a bare template (a file that does not end in `.json`).

    Raises StartupError if `override` is missing, or a file has unexpected content.
    """
    own = model / "tokenizer_config.json"
    # Some models have their tokens' names or their template only in the files of older tokenizers and processors.
    older = read_object(model / "special_tokens_map.json") | read_object(model / "chat_template.json")
    if override is not None and override.suffix != ".json":
        return _parse(own, older | read_object(own), {DEFAULT_TEMPLATE: _read_text(override)})
    path = override or own
    config = read_object(path, required=override is not None)
    files = {} if override is not None and config.get("chat_template") else _template_files(model)
    return _parse(path, older | config, files)


def _parse(path: Path, config: dict[str, Any], files: Mapping[str, str]) -> TokenizerConfig:
    named = config.get("tokenizer_class")
    return TokenizerConfig(
        tokens={name: token for name in TOKEN_NAMES if (token := _token(config.get(name))) is not None},
        add_bos_token=config.get("add_bos_token"),
        add_eos_token=config.get("add_eos_token"),
        response_template=config.get("response_template"),
        tokenizer_class=named if isinstance(named, str) else _GENERIC_CLASS,
        chat_templates={**_inline_templates(config.get("chat_template"), path), **files},
    )


def _inline_templates(value: Any, path: Path) -> dict[str, str]:
    """Reads one template, or a list of `{"name": ..., "template": ...}`. Raises StartupError for another list."""
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if not isinstance(value, list):
        return {}
    templates = {}
    for entry in value:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise StartupError(f"{path}: `chat_template` must be a text, or a list of names with their templates")
    return templates


def _template_files(model: Path) -> dict[str, str]:
    """Reads `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, which override inline templates."""
    templates = {path.stem: _read_text(path) for path in sorted((model / "additional_chat_templates").glob("*.jinja"))}
    main = model / "chat_template.jinja"
    if main.is_file():
        templates[DEFAULT_TEMPLATE] = _read_text(main)
    return templates


def _token(value: Any) -> str | None:
    token = value.get("content") if isinstance(value, dict) else value
    return token if isinstance(token, str) else None


def read_object(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Reads a JSON object from a file. required: False returns an empty object if there is no file.

    Raises StartupError if a required file is missing, or its content is not an object.
    """
    if not path.is_file() and not required:
        return {}
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} is not a JSON object")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
