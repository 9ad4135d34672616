"""Incremental detokenization: text from tokens as they are generated."""

from collections.abc import Sequence

from tgi_server.router.text.tokenizer import TextTokenizer

# Tokens that are decoded before a new one, as it may depend on them (SentencePiece drops the space of the first token).
_CONTEXT = 5
# Last tokens of a prompt among which these are looked for, since special tokens are skipped.
_LOOKED_AT = 64
# A character has at most four bytes. So _PATIENCE tokens without a complete character cannot all be the beginning of
# one; the last _BEGUN of them may be.
_PATIENCE, _BEGUN = 8, 3
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Decodes one sequence's tokens one by one.

    A token whose bytes end in the middle of a character yields no text; the token that completes the character yields
    all of it, even if it has begun in the prompt. Do not pass special tokens, which are not part of the text.

    `DecodeStream` of `tokenizers` cannot be used: it repeats the prompt's part of such a character, waits for ever
    after bytes that are not a character, and cannot return what is left at the end.
    """

    __slots__ = ("_known", "_known_text", "_of_prompt", "_pending", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        context = [prompt_id for prompt_id in prompt_ids[-_LOOKED_AT:] if prompt_id not in tokenizer.special_tokens]
        self._known = context[-_CONTEXT:]
        self._known_text = tokenizer.decode(self._known) if self._known else ""
        self._pending: list[int] = []
        self._of_prompt = ""  # the text of the prompt's pending tokens, which must not be returned
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
        """Returns the text of the tokens without a complete character, with U+FFFD for incomplete ones."""
        if not self._pending:
            return ""
        text = self._tokenizer.decode(self._known + self._pending)
        self._pending = []
        return self._new(text)

    def _new(self, text: str) -> str:
        """Returns the text after that of the known tokens. text: the text of known and pending tokens."""
        new = text[len(self._known_text) :].removeprefix(self._of_prompt)
        self._of_prompt = ""
        return new
