"""Converts the model's tokenizer to the form that llguidance needs."""

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from tgi_server.grammar.added_tokens import add_missing_tokens, decoded, has_further_tokens
from tgi_server.grammar.closing import ClosingOrder
from tgi_server.grammar.errors import InvalidGrammar

# Maximum number of different hints in one grammar.
MAX_HINTS = 64
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_ANCHOR = "a"
# In llguidance's vocabulary this byte, followed by a name, stands for a special token.
_SPECIAL = b"\xff"
# Strings, regular expressions and comments of a Lark grammar, in which angle brackets are text; and names in brackets.
# An unterminated string or expression is matched as well, although the grammar is invalid: this keeps matching linear.
_LARK_LEXEME = re.compile(r'"(?:\\.|[^"\\])*"?|/(?:\\.|[^/\\\n])+/?|(?://|#)[^\n]*|<[^<>\s]+>')


def _byte_level() -> dict[str, int]:
    """Returns the byte that each character stands for in byte-level tokenizers such as GPT-2's."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in shown)
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_level()
# The same for `str.translate`, with each byte as its Latin-1 character.
_LATIN = {ord(character): byte for character, byte in BYTES.items()}
# Files from which `transformers` creates a fast tokenizer if there is no tokenizer.json.
_OLDER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")


def has_tokenizer(model: Path) -> bool:
    """Returns True if the model's folder has tokenizer files. Their content is not checked."""
    return any((model / name).is_file() for name in ("tokenizer.json", *_OLDER_FILES))


def read_definition(model: Path) -> str:
    """Returns the content of the model's tokenizer.json, with the tokens that other files of the folder add to it.

    Without a tokenizer.json, `transformers` converts older files. Raises OSError, ValueError, LookupError or TypeError.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        return _convert(model)
    definition = file.read_text(encoding="utf-8")
    if not has_further_tokens(definition, model):
        return definition
    tokenizer = Tokenizer.from_str(definition)
    add_missing_tokens(tokenizer, model)
    return tokenizer.to_str()


class GrammarTokenizer:
    """The model's tokenizer as llguidance uses it.

    lookup: llguidance's tokenizer. eos: the tokens that may end a text; the first is used when the end is forced.
    closing: ranks tokens by how soon they end a text. markers: token ids past the vocabulary, which stand for hints in
    grammars; the model never sees them.

    Special tokens are not text. All other tokens are, whatever they look like: many models write `<tool_call>` or `<b>`
    with tokens that were added to the tokenizer as ordinary ones. llguidance would treat any added token in angle
    brackets as special, and is therefore given the bytes of each token.
    """

    def __init__(self, definition: str, vocab_size: int, eos: Sequence[int]) -> None:
        """definition: content of a tokenizer.json. vocab_size: the model's vocabulary size. eos: empty: taken from the
        definition.

        Added tokens with ids beyond `vocab_size` are left out. Raises InvalidGrammar if other tokens have such ids, or
        if no end-of-sequence token is known.
        """
        content = decoded(definition)
        content["truncation"] = content["padding"] = None
        content["added_tokens"] = [each for each in content.get("added_tokens", ()) if each["id"] < vocab_size]
        if (size := _size(content)) > vocab_size:
            raise InvalidGrammar(f"this model's tokenizer has {size} tokens, and the model {vocab_size}")
        self.markers = range(vocab_size, vocab_size + MAX_HINTS)
        self.eos = tuple(eos) or _named_ends(content)
        added = {each["id"]: each["content"] for each in content["added_tokens"]}
        special = {each["id"] for each in content["added_tokens"] if each["special"]}
        # End-of-sequence tokens are never text, though some tokenizers do not declare them as special.
        names = {token: added.get(token, f"\ue0a0end {token}\ue0a1") for token in special.union(self.eos)}
        names |= {token: f"\ue0a0hint {index}\ue0a1" for index, token in enumerate(self.markers)}
        self._ordinary = {name: token for token, name in added.items() if token not in names}
        spelled = SpelledTokenizer(content, self.markers.stop, self.eos[0], names)
        self._spellings = spelled.tokens
        ordinary = (b"" if text[:1] == _SPECIAL else text for text in spelled.tokens[:vocab_size])
        self.closing = ClosingOrder(list(ordinary))
        self.lookup = LLTokenizer(TokenizerWrapper(spelled), n_vocab=self.markers.stop, eos_token=list(self.eos))

    @classmethod
    def of_model(cls, model: Path, vocab_size: int, eos: Sequence[int]) -> "GrammarTokenizer":
        """Reads the tokenizer in a model's folder, see `read_definition`. Takes seconds for a large vocabulary.

        Raises InvalidGrammar.
        """
        try:
            return cls(read_definition(model), vocab_size, eos)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidGrammar(f"this model's tokenizer cannot be read: {_line(error)}") from error

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text that stands inside another text."""
        tokens: list[int] = self.lookup.tokenize_str(text)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.lookup.decode_str(list(tokens))
        return text

    def spelling(self, token: int) -> bytes:
        """Returns the bytes of a token in the middle of a text; for a special token, its name."""
        return self._spellings[token].removeprefix(_SPECIAL)

    def with_ids(self, lark: str) -> str:
        """Replaces names such as `<think>` in a Lark grammar by token ids, if they are added tokens but not special.

        llguidance knows the names of special tokens itself.
        """

        def token(found: re.Match[str]) -> str:
            token_id = self._ordinary.get(found[0])
            return found[0] if token_id is None else f"<[{token_id}]>"

        return _LARK_LEXEME.sub(token, lark)


class SpelledTokenizer:
    """A tokenizer for `llguidance.TokenizerWrapper`: it has the bytes of each token, and a call encodes a text.

    tokens: the bytes of each token, by id; for a special token, llguidance's mark and its name.
    """

    bos_token_id = None

    def __init__(self, content: Mapping[str, Any], size: int, eos: int, special: Mapping[int, str]) -> None:
        """content: a decoded tokenizer.json. size: vocabulary size. special: names of the tokens that are not text."""
        self.eos_token_id = eos
        content = _without(special, content)
        definition = msgspec.json.encode(content).decode()
        spelled = _spelled(content, special)
        if spelled is not None:
            self._encode, spellings = _encoder(Tokenizer.from_str(definition)), spelled
        else:
            self._encode, spellings = _byte_tokenizer(definition) or _decoding_tokenizer(definition, size)
        spellings += [b""] * (size - len(spellings))
        self.tokens = [_SPECIAL + special[i].encode() if i in special else each for i, each in enumerate(spellings)]
        self._longest = max(map(len, self.tokens), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Encodes a text: by the model's tokenizer if the tokens' bytes are the text, else by the longest tokens."""
        try:
            tokens = self._encode(text.decode())
        except UnicodeDecodeError:
            return self._longest_tokens(text)
        spelled = b"".join(self.tokens[token] for token in tokens)
        if spelled == text:
            return tokens
        if tokens and spelled == b" " + text and self.tokens[tokens[0]] == b" ":
            return tokens[1:]
        return self._longest_tokens(text)

    @cached_property
    def _by_spelling(self) -> dict[bytes, int]:
        return {spelling: token for token, spelling in enumerate(self.tokens) if spelling[:1] not in (b"", _SPECIAL)}

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
                break  # no token begins with this byte
        return tokens


_Texts = tuple[Callable[[str], list[int]], list[bytes]]
"""A function that encodes a text, and the bytes of each token."""


def _encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    return encode


def _spelled(content: Mapping[str, Any], special: Container[int]) -> list[bytes] | None:
    """Returns the bytes of each token of a byte-level tokenizer, ten times as fast as `_byte_tokenizer`.

    Returns None for another kind of tokenizer, or one with tokens that are not made of bytes. content: a decoded
    tokenizer.json. special: ids of tokens that are not text; their bytes are empty.
    """
    vocab = content["model"]["vocab"]
    if (content.get("decoder") or {}).get("type") != "ByteLevel" or not isinstance(vocab, dict):
        return None
    added = {each["id"]: each["content"] for each in content["added_tokens"]}
    pieces = {piece: token for piece, token in vocab.items() if token not in added and token not in special}
    if not BYTES.keys() >= set("".join(pieces)):
        return None
    spellings = [b""] * _size(content)
    for piece, token in pieces.items():
        spellings[token] = piece.translate(_LATIN).encode("latin-1")
    for token, text in added.items():
        spellings[token] = b"" if token in special else text.encode()
    marked = {text for text in spellings if text[:1] == _SPECIAL}  # llguidance would read them as special tokens
    if not marked <= {_SPECIAL}:
        return None
    return [b"" if text in marked else text for text in spellings]


def _byte_tokenizer(definition: str) -> _Texts | None:
    """Returns the tokens of a byte-level tokenizer as llguidance reads it; None for another kind of tokenizer."""
    try:
        own = LLTokenizer(definition, slices=[])
    except ValueError:
        return None
    return own.tokenize_str, [bytes(own.decode_bytes([token])) for token in range(own.vocab_size)]


def _decoding_tokenizer(definition: str, size: int) -> _Texts:
    """Returns the tokens of any kind of tokenizer, found by decoding.

    A token's bytes are those that it adds after another token: a decoder may add or remove a space between the two.
    """
    tokenizer = Tokenizer.from_str(definition)
    anchor = next(iter(tokenizer.encode(_ANCHOR, add_special_tokens=False).ids), None)

    def spelling(token: int) -> bytes:
        name = tokenizer.id_to_token(token)
        if name is None:
            return b""
        if byte := _BYTE.match(name):
            return bytes.fromhex(byte[1])
        if anchor is None:
            return bytes(tokenizer.decode([token]).encode())
        before: str = tokenizer.decode([anchor])
        joined: str = tokenizer.decode([anchor, token])
        # If the token changes how the one before it is decoded, it has no bytes of its own.
        return joined.removeprefix(before).encode() if joined.startswith(before) else b""

    return _encoder(tokenizer), [spelling(token) for token in range(size)]


def _without(special: Container[int], content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content changed so that no text encodes to special tokens. The ids of tokens stay the same."""
    vocab = content["model"]["vocab"]
    own = {piece for piece, _ in vocab} if isinstance(vocab, list) else vocab.keys()
    added = [
        {**each, "content": f"\ue0a0special {each['id']}\ue0a1"} if each["id"] in special else each
        for each in content["added_tokens"]
        if each["id"] not in special or each["content"] not in own
    ]
    return {**content, "added_tokens": added}


def _named_ends(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens that llguidance finds by name. Raises InvalidGrammar if it finds none."""
    try:
        return tuple(LLTokenizer(json.dumps(content), slices=[]).eos_tokens)
    except ValueError as error:
        raise InvalidGrammar(f"this model's tokenizer does not say which token ends a text: {error}") from error


def _size(content: Mapping[str, Any]) -> int:
    """Returns the tokenizer's highest id plus 1."""
    vocab = content["model"]["vocab"]
    highest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    return 1 + max([highest, *(token["id"] for token in content["added_tokens"])])


def _convert(model: Path) -> str:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds, and few models need it

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("transformers has no fast form of it")
    definition: str = tokenizer.backend_tokenizer.to_str()
    return definition


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
