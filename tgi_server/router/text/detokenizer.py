"""Text from tokens, as they come."""

from collections.abc import Sequence

from tgi_server.router.text.tokenizer import TextTokenizer

# A decoder may join a token to the one before it (SentencePiece drops the space in front of the first).
_CONTEXT = 5
# So many last tokens of a prompt are searched for the ones before its special tokens.
_LOOKED_AT = 64
# A character has at most four bytes; that many tokens without a whole character are not the beginning of one. The last
# ones may be.
_PATIENCE, _BEGUN = 8, 3
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """One sequence's text, token by token.

    A token whose bytes end in the middle of a character yields nothing; the token that completes the character
    yields all of it. Special tokens do not belong here: they have no text of their own in a sequence.
    """

    __slots__ = ("_known", "_known_text", "_pending", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        context = [each for each in prompt_ids[-_LOOKED_AT:] if each not in tokenizer.special_tokens]
        self._known = context[-_CONTEXT:]
        self._known_text = tokenizer.decode(self._known) if self._known else ""
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        """Returns the text that is complete with this token."""
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._known + self._pending)
        begun = []
        if text.endswith(_INCOMPLETE):
            if len(self._pending) < _PATIENCE:
                return ""
            self._pending, begun = self._pending[:-_BEGUN], self._pending[-_BEGUN:]
            text = self._tokenizer.decode(self._known + self._pending)
        new = text[len(self._known_text) :]
        self._known, self._pending = self._pending, begun
        self._known_text = self._tokenizer.decode(self._known)
        return new

    def flush(self) -> str:
        """Returns the text of tokens that never became a whole character, with a mark for what is missing."""
        if not self._pending:
            return ""
        text = self._tokenizer.decode(self._known + self._pending)
        self._pending = []
        return text[len(self._known_text) :]
