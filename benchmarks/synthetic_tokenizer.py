"""A tokenizer of any vocabulary size, made of rules rather than learned from a corpus."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.words import COMMON, made_up

# The character that byte-level tokenizers write for the space in front of a word.
_SPACE = "Ġ"
_UNSPACED = ("Hello", "World", *COMMON)
_SPACED = ("World", "Hello", *COMMON)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def build_tokenizer(vocab_size: int, special_tokens: list[str]) -> Tokenizer:
    """Makes a byte-level BPE tokenizer with exactly `vocab_size` tokens; the special ones have the ids from 0 on.

    It knows every byte, every beginning of the common words, and beginnings of made-up words for the rest: a token is
    the longest known beginning of what is left of a word. It adds no token of its own to a text.

    Raises ValueError when the vocabulary is too small for the bytes.
    """
    vocabulary = [*special_tokens, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(vocabulary):
        raise ValueError(f"a vocabulary needs at least {len(vocabulary)} tokens, not {vocab_size}")
    merges = _merges(vocab_size - len(vocabulary))
    vocabulary += [left + right for left, right in merges]
    ids = {token: token_id for token_id, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, roles: dict[str, str], max_length: int, folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`. roles: such as {"bos_token": "<s>"}."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _merges(count: int) -> list[tuple[str, str]]:
    """Pairs that each add one character to a known beginning.

    Those of words with a space in front come first: a merge inside a word must not come before the word's own, which
    start at its space.
    """
    unspaced = list(_beginnings(_UNSPACED, set()))[:count]
    seen: set[str] = set()
    spaced = _beginnings((_SPACE + word for word in _endless(_SPACED)), seen)
    return [next(spaced) for _ in range(count - len(unspaced))] + unspaced


def _endless(first: Iterable[str]) -> Iterator[str]:
    yield from first
    yield from made_up(Random(0))


def _beginnings(words: Iterable[str], seen: set[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in seen:
                seen.add(word[:end])
                yield word[: end - 1], word[end - 1]
