"""End-of-sequence tokens, from all files of a model's folder that name some.

Fine-tunes often name the end of a turn in one file only: most in `generation_config.json`, many in the configuration of
their tokenizer. Therefore each of them counts, as in TGI and vLLM.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tgi_server.engine.checkpoint.model_folder import ModelFolder
from tgi_server.grammar.added_tokens import added_ids
from tgi_server.grammar.tokenizer import has_tokenizer, read_definition

logger = logging.getLogger(__name__)


def end_token_ids(folder: ModelFolder, default: object, vocab_size: int) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens of `generation_config.json`, the tokenizer and `config.json`.

    The first is the one that ends a text which a grammar allows to go no further. Tokens that the vocabulary does not
    have are left out, with a warning: -1 stands for none. default: one or several, or None, for a model whose files
    name none.
    """
    named = [
        *_listed(folder.generation.get("eos_token_id")),
        *_of_tokenizer(folder.path),
        *_listed(folder.config.get("eos_token_id")),
        *_listed(_object(folder.config.get("text_config")).get("eos_token_id")),
    ]
    tokens = named or _listed(default)
    if unknown := [token for token in tokens if not (_is_id(token) and token < vocab_size)]:
        logger.warning(
            "end-of-sequence tokens that are not in the vocabulary of %d are ignored: %s", vocab_size, unknown
        )
    return tuple(dict.fromkeys(int(token) for token in tokens if token not in unknown))


def _of_tokenizer(folder: Path) -> Iterator[int]:
    """Yields the id of the tokenizer's own end-of-sequence token, if it has one."""
    # Older tokenizers name their tokens in a file of their own.
    config = _read(folder / "special_tokens_map.json") | _read(folder / "tokenizer_config.json")
    token = config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str) or not has_tokenizer(folder):
        return
    try:
        definition = read_definition(folder)
        token_id = added_ids(definition).get(content)
        if token_id is None:
            token_id = Tokenizer.from_str(definition).token_to_id(content)
    except Exception as error:  # the library raises plain exceptions; the router reports what it cannot read
        logger.warning("the end-of-sequence token %r of the tokenizer is not used: %s", content, error)
        return
    if token_id is None:
        logger.warning("the tokenizer has no token %r, which its configuration says ends a text", content)
    else:
        yield token_id


def _listed(tokens: object) -> list[Any]:
    return tokens if isinstance(tokens, list) else [tokens] if tokens is not None else []


def _is_id(token: object) -> bool:
    return isinstance(token, int | float) and not isinstance(token, bool) and token >= 0 and float(token).is_integer()


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one if it cannot be read, which other code reports."""
    try:
        return _object(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
