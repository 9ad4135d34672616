"""Text from tokens, as they come."""

from collections.abc import Sequence
from itertools import islice

from tgi_server.router.tokenization import TextTokenizer

# A decoder may join a token to the one before it (SentencePiece drops the space in front of the first).
_CONTEXT = 5
# A character has at most four bytes; that many tokens without a whole character are not the beginning of one.
_PATIENCE = 8
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """One sequence's text, token by token.

    A token whose bytes end in the middle of a character yields nothing; the token that completes the character
    yields all of it. Special tokens do not belong here: they have no text of their own in a sequence.
    """

    __slots__ = ("_known", "_known_text", "_pending", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        context = islice((each for each in reversed(prompt_ids) if each not in tokenizer.special_tokens), _CONTEXT)
        self._known = list(context)[::-1]
        self._known_text = tokenizer.decode(self._known) if self._known else ""
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        """The text that is complete with this token."""
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._known + self._pending)
        if text.endswith(_INCOMPLETE) and len(self._pending) < _PATIENCE:
            return ""
        new = text[len(self._known_text) :]
        self._known, self._pending = self._pending, []
        self._known_text = self._tokenizer.decode(self._known)
        return new

    def flush(self) -> str:
        """The text of tokens that never became a whole character, with a replacement mark for what is missing."""
        if not self._pending:
            return ""
        text = self._tokenizer.decode(self._known + self._pending)
        self._pending = []
        return text[len(self._known_text) :]
