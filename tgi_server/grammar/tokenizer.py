"""The model's tokenizer as llguidance sees it."""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from tgi_server.grammar.errors import InvalidGrammar

# Different hints of one grammar.
MAX_HINTS = 64
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_ANCHOR = "a"

# Files of which `transformers` makes a fast tokenizer where there is no tokenizer.json.
_OLDER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")


def has_tokenizer(model: Path) -> bool:
    """Returns True if the model's folder has files of a tokenizer. Only reading them shows if they are good."""
    return any((model / name).is_file() for name in ("tokenizer.json", *_OLDER_FILES))


def read_definition(model: Path) -> str:
    """Returns the content of the model's tokenizer.json, or what `transformers` makes of files of an older kind.

    Raises OSError, ValueError, LookupError or TypeError.
    """
    file = model / "tokenizer.json"
    return file.read_text(encoding="utf-8") if file.is_file() else _convert(model)


class GrammarTokenizer:
    """lookup: llguidance's form of it. eos: what may end a text that matches; the first is taken where it must end.

    markers: ids past the vocabulary. In a grammar each is the place of a hint; the model never sees them.
    """

    def __init__(self, definition: str, vocab_size: int, eos: Sequence[int]) -> None:
        """definition: a tokenizer.json. vocab_size: of the model; it may exceed the tokenizer's. Tokens that were added
        to the tokenizer, and that the model does not know, are left out.

        Raises InvalidGrammar when llguidance cannot take the tokenizer, or the model does not know its own tokens.
        """
        content = json.loads(definition)
        content["truncation"] = content["padding"] = None
        content["added_tokens"] = [each for each in content.get("added_tokens", ()) if each["id"] < vocab_size]
        if (size := _size(content)) > vocab_size:
            raise InvalidGrammar(f"this model's tokenizer has {size} tokens, and the model {vocab_size}")
        self.markers = range(vocab_size, vocab_size + MAX_HINTS)
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
        try:
            return cls(read_definition(model), vocab_size, eos)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidGrammar(f"this model's tokenizer cannot be read: {_line(error)}") from error

    @cached_property
    def _plain(self) -> LLTokenizer:
        """Encodes a text without markers, whose names a hint may contain."""
        return LLTokenizer(self._definition)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text that stands inside another."""
        tokens: list[int] = self._plain.tokenize_str(text)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.lookup.decode_str(list(tokens))
        return text


class SpelledTokenizer:
    """A tokenizer that llguidance cannot read, told to it (`llguidance.TokenizerWrapper`) token by token.

    A token's spelling is what a text that ends with another token grows by: a decoder may well put a space between
    the two, or leave one out.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos: int, special: Sequence[tuple[int, str]]) -> None:
        """size: of the vocabulary, special tokens of the caller's own included. special: these, and their names."""
        self._tokenizer = tokenizer
        self.eos_token_id = eos
        added = {token: each.content for token, each in tokenizer.get_added_tokens_decoder().items() if each.special}
        names = {**added, **dict(special)}
        self.special_token_ids = sorted(names)
        self._anchor = next(iter(tokenizer.encode(_ANCHOR, add_special_tokens=False).ids), None)
        self.tokens = [names[i].encode() if i in names else self._spelling(i) for i in range(size)]
        self._by_spelling = {
            spelling: token for token, spelling in enumerate(self.tokens) if spelling and token not in names
        }
        self._longest = max(map(len, self._by_spelling), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Returns the model's own tokens for a text if they spell it, else the longest that do, from the left."""
        try:
            tokens: list[int] = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            return self._longest_tokens(text)
        spelled = b"".join(self.tokens[token] for token in tokens)
        if spelled == text:
            return tokens
        if tokens and spelled == b" " + text and self.tokens[tokens[0]] == b" ":
            return tokens[1:]
        return self._longest_tokens(text)

    def _spelling(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if byte := _BYTE.match(name):
            return bytes.fromhex(byte[1])
        if self._anchor is None:
            return bytes(self._tokenizer.decode([token]).encode())
        before: str = self._tokenizer.decode([self._anchor])
        behind: str = self._tokenizer.decode([self._anchor, token])
        # A decoder that changes what stands before the token cannot be told of as a list of spellings.
        return behind.removeprefix(before).encode() if behind.startswith(before) else b""

    def _longest_tokens(self, text: bytes) -> list[int]:
        tokens, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                token = self._by_spelling.get(text[start:end])
                if token is not None:
                    tokens.append(token)
                    start = end
                    break
            else:
                break  # no token spells this byte, and so none the rest
        return tokens


def _size(content: dict[str, Any]) -> int:
    """Returns the number of ids up to the highest that the tokenizer knows."""
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
        raise ValueError("transformers has no fast form of it")
    definition: str = tokenizer.backend_tokenizer.to_str()
    return definition


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
