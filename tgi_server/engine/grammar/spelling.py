"""Tokenizers that llguidance cannot read, told to it token by token: what each is spelled like inside a text."""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_ANCHOR = "a"


class SpelledTokenizer:
    """What `llguidance.TokenizerWrapper` asks for: the bytes of every token, and tokens of a text.

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
        """The model's own tokens for a text where they spell it; else the longest tokens that do, from the left."""
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
