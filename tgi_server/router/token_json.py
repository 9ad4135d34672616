"""Tokens as JSON text, written directly: no object is built for a token."""

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from math import isfinite

from shared.stubs.generate_pb2 import TopTokens
from tgi_server.router.tokenization import TextTokenizer

quoted: Callable[[str], str] = encode_basestring
"""A string as JSON, characters beyond ASCII left as they are."""


def number(value: float | None) -> str:
    """A logprob as JSON, with the digits that a 32-bit float has; null when there is none."""
    return f"{value:.8g}" if value is not None and isfinite(value) else "null"


def optional(value: int | None) -> str:
    return "null" if value is None else str(value)


def token_json(token_id: int, text: str, logprob: float | None, *, special: bool) -> str:
    flag = "true" if special else "false"
    return f'{{"id":{token_id},"text":{quoted(text)},"logprob":{number(logprob)},"special":{flag}}}'


def top_tokens_json(tokenizer: TextTokenizer, top: TopTokens) -> str:
    """The most likely tokens at one position, as a JSON array."""
    return f"[{','.join(_top(tokenizer, top.ids, top.logprobs))}]"


def _top(tokenizer: TextTokenizer, ids: Sequence[int], logprobs: Sequence[float]) -> list[str]:
    return [
        token_json(each, tokenizer.token_text(each), logprob, special=each in tokenizer.special_tokens)
        for each, logprob in zip(ids, logprobs, strict=True)
    ]
