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
    yields all of it, also where it has begun in the prompt. Special tokens do not belong here: they have no text of
    their own in a sequence.

    `DecodeStream` of `tokenizers` does not do: it returns the prompt's part of such a character again, waits for ever
    after bytes that are not a character, and cannot say what is left at the end.
    """

    __slots__ = ("_known", "_known_text", "_of_prompt", "_pending", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        context = [prompt_id for prompt_id in prompt_ids[-_LOOKED_AT:] if prompt_id not in tokenizer.special_tokens]
        self._known = context[-_CONTEXT:]
        self._known_text = tokenizer.decode(self._known) if self._known else ""
        self._pending: list[int] = []
        self._of_prompt = ""  # what stands for the pending tokens of the prompt if they never become a character
        if not prompt_ids or prompt_ids[-1] in tokenizer.special_tokens:
            return
        whole = self._known_text
        while self._known_text.endswith(_INCOMPLETE) and len(self._pending) < _BEGUN:
            self._pending.insert(0, self._known.pop())
            self._known_text = tokenizer.decode(self._known) if self._known else ""
        self._of_prompt = whole[len(self._known_text) :]

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
        new = self._new(text)
        self._known, self._pending = self._pending, begun
        known = self._known
        self._known_text = self._tokenizer.decode_one(known[0]) if len(known) == 1 else self._tokenizer.decode(known)
        return new

    def flush(self) -> str:
        """Returns the text of tokens that never became a whole character, with a mark for what is missing."""
        if not self._pending:
            return ""
        text = self._tokenizer.decode(self._known + self._pending)
        self._pending = []
        return self._new(text)

    def _new(self, text: str) -> str:
        """Returns what comes after the known tokens in a text with pending ones."""
        new = text[len(self._known_text) :].removeprefix(self._of_prompt)
        self._of_prompt = ""
        return new
