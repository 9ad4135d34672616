"""Tokens that a model's folder adds to its tokenizer outside `tokenizer.json`, with the ids of `transformers`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONFIG, _MAP, _OLDER = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


class _Added(msgspec.Struct):
    id: int
    content: str


class _Definition(msgspec.Struct):
    """The part of a tokenizer.json that is decoded here. Decoding a large vocabulary as well takes half a second."""

    added_tokens: list[_Added] | None = None


def decoded(definition: str) -> Any:
    """Decodes a tokenizer.json to Python objects. Raises ValueError."""
    try:
        return msgspec.json.decode(definition)  # takes a third of json's time
    except msgspec.MsgspecError:  # it refuses some text that json accepts
        return json.loads(definition)


def added_ids(definition: str) -> dict[str, int]:
    """Returns the ids of the tokens that a tokenizer.json adds to its vocabulary. Raises ValueError."""
    try:
        return {
            token.content: token.id for token in msgspec.json.decode(definition, type=_Definition).added_tokens or ()
        }
    except msgspec.MsgspecError:
        return {each["content"]: each["id"] for each in decoded(definition).get("added_tokens") or ()}


def add_missing_tokens(tokenizer: Tokenizer, model: Path) -> bool:
    """Adds tokens to `tokenizer` that other files of the model's folder declare. Returns True if it added any.

    Tokens are added in the order of their ids in the files; each gets the next free id, as in `transformers`. Tokens
    beyond the model's vocabulary are left out: the model has no embedding for them. Raises OSError, or ValueError for a
    file with unexpected content.
    """
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in _declared(model) if token.content not in added]
    if not missing:
        return False
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    bound, free = _vocabulary_size(model), max(vocabulary.values(), default=-1) + 1
    known: dict[str, AddedToken] = {}
    for token in missing:
        if token.content not in vocabulary and token.content not in known:
            if bound is not None and free >= bound:
                continue
            free += 1
        known.setdefault(token.content, token)
    return tokenizer.add_tokens(list(known.values())) > 0


def has_further_tokens(definition: str, model: Path) -> bool:
    """Returns True if other files of the folder declare tokens that the tokenizer.json `definition` does not add.

    Raises OSError, or ValueError for a file with unexpected content.
    """
    declared = {token.content for token in _declared(model)}
    return bool(declared) and not declared <= added_ids(definition).keys()


def _declared(model: Path) -> Iterator[AddedToken]:
    """Yields the tokens that the files declare with ids, in the order of these ids, then those without an id."""
    config = _read(model / _CONFIG)
    given = config.get("added_tokens_decoder")
    if given is None:
        config = _read(model / _MAP) | config
    named = {name for key in _NAMED if (name := _content(config.get(key)))}
    further = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    lists = list(further.values() if isinstance(further, dict) else further)
    if given is not None:
        for token_id in sorted(_object(given, f"{model / _CONFIG}: added_tokens_decoder"), key=_number):
            yield _token(given[token_id], f"{model / _CONFIG}: added_tokens_decoder.{token_id}", named)
    else:
        older = _read(model / _OLDER)
        for name in sorted(older, key=lambda each: _number(older[each])):
            special = name in named or name in map(_content, lists)
            yield AddedToken(name, special=special, normalized=not special)
    for value in (*(config.get(key) for key in _NAMED), *lists):
        if name := _content(value):
            yield _token(value if isinstance(value, dict) else {"content": name}, name, {name})


def _token(value: Any, place: str, named: set[str]) -> AddedToken:
    content = _content(_object(value, place))
    if content is None:
        raise ValueError(f"{place} has no `content`; the text of a token is needed")
    flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
    return AddedToken(content, **(flags | ({"special": True} if content in named else {})))


def _content(value: Any) -> str | None:
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) and found else None


def _number(text: Any) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is not the id of an added token; a whole number is needed") from None


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {value!r:.80}; an object is needed")
    return value


def _read(file: Path) -> dict[str, Any]:
    return _object(json.loads(file.read_text(encoding="utf-8")), str(file)) if file.is_file() else {}


def _vocabulary_size(model: Path) -> int | None:
    """Returns the model's vocabulary size; None if its config.json does not give it."""
    config = _read(model / "config.json")
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else {}).get("vocab_size", config.get("vocab_size"))
    return found if isinstance(found, int) else None
