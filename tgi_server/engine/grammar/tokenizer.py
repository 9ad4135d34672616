"""The model's tokenizer as llguidance sees it."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from tgi_server.engine.grammar.errors import InvalidGrammar
from tgi_server.engine.grammar.spelling import SpelledTokenizer

MAX_HINTS = 64
"""How many different hints one grammar may have."""

# Files of which `transformers` makes a fast tokenizer where there is no tokenizer.json.
_OLDER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")


def has_tokenizer(model: Path) -> bool:
    """Whether the model's folder has files of a tokenizer; whether they are good is seen when they are read."""
    return any((model / name).is_file() for name in ("tokenizer.json", *_OLDER_FILES))


class GrammarTokenizer:
    """lookup: llguidance's form of it. eos: what may end a text that matches; the first is taken where it must end.

    markers: ids past the vocabulary. In a grammar each is the place of a hint; the model never sees them.
    """

    def __init__(self, definition: str, vocab_size: int, eos: Sequence[int]) -> None:
        """definition: a tokenizer.json. vocab_size: of the model; it may exceed the tokenizer's.

        Raises InvalidGrammar when llguidance cannot take the tokenizer.
        """
        content = json.loads(definition)
        content["truncation"] = content["padding"] = None
        content.setdefault("added_tokens", [])
        first = max(vocab_size, _size(content))
        self.markers = range(first, first + MAX_HINTS)
        markers = [(token, f"\ue0a0hint {index}\ue0a1") for index, token in enumerate(self.markers)]
        added = [*content["added_tokens"], *(_special(token, name) for token, name in markers)]
        own_form = json.dumps({**content, "added_tokens": added})
        self._definition = json.dumps(content)
        ends = list(eos) or None
        try:
            self.lookup = LLTokenizer(own_form, n_vocab=self.markers.stop, eos_token=ends)
        except ValueError as error:
            if not eos:
                raise InvalidGrammar(f"this model's tokenizer says nothing of where a text ends: {error}") from error
            spelled = SpelledTokenizer(Tokenizer.from_str(self._definition), self.markers.stop, eos[0], markers)
            self.lookup = self._plain = LLTokenizer(
                TokenizerWrapper(spelled), n_vocab=self.markers.stop, eos_token=ends
            )
        self.eos = tuple(eos) or tuple(self.lookup.eos_tokens)

    @classmethod
    def of_model(cls, model: Path, vocab_size: int, eos: Sequence[int]) -> "GrammarTokenizer":
        """Reads tokenizer.json, or has `transformers` make one of older files. Takes up to a second.

        Raises InvalidGrammar.
        """
        file = model / "tokenizer.json"
        try:
            return cls(file.read_text(encoding="utf-8") if file.is_file() else _convert(model), vocab_size, eos)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidGrammar(f"this model's tokenizer cannot be read: {_line(error)}") from error

    @cached_property
    def _plain(self) -> LLTokenizer:
        """Without markers, whose names a hint may contain."""
        return LLTokenizer(self._definition)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that stands inside another."""
        tokens: list[int] = self._plain.tokenize_str(text)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.lookup.decode_str(list(tokens))
        return text


def _size(content: dict[str, Any]) -> int:
    """Ids up to the highest that the tokenizer knows."""
    vocab = content["model"]["vocab"]
    highest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    return 1 + max([highest, *(token["id"] for token in content["added_tokens"])])


def _special(token: int, name: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": name, "special": True, **flags}


def _convert(model: Path) -> str:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds, and few models need it

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("it has no fast form")
    definition: str = tokenizer.backend_tokenizer.to_str()
    return definition


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
