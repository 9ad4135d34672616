"""Text from tokens, as they come, and the texts that end it."""

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


class StopSequences:
    """Watches one sequence's text as it grows.

    TGI's routes show the stop sequence (`reveal`): text is passed on as it comes. OpenAI's do not: text that may be
    the beginning of a stop sequence is held back until it is certain that it is not.
    """

    __slots__ = ("_buffer", "_longest", "_sequences", "found", "reveal")

    def __init__(self, sequences: Sequence[str], *, reveal: bool) -> None:
        self._sequences = tuple(sequences)
        self._longest = max(map(len, sequences))
        self.reveal = reveal
        # The one that ended the text.
        self.found: str | None = None
        # With `reveal`, the end of what was passed on; else what is held back.
        self._buffer = ""

    def contain(self, text: str) -> bool:
        """Returns True if `text` may be part of a stop sequence. Special tokens are looked at: they are not shown."""
        return any(text in sequence for sequence in self._sequences)

    def feed(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Adds the next piece. Returns the text that may be shown now, and True if a stop sequence is complete.

        may_end: stop sequences that are complete with this piece count; those that begin in it always do.
        """
        if not text:
            return "", False
        seen = self._buffer + text
        found = self._first(seen) if may_end else None
        if found is not None:
            start, self.found = found
            sequence = self.found
            shown = seen[len(self._buffer) : start + len(sequence)] if self.reveal else seen[:start]
            self._buffer = ""
            return shown, True
        if self.reveal:
            self._buffer = seen[-self._longest + 1 :] if self._longest > 1 else ""
            return text, False
        held = self._held(seen)
        self._buffer = seen[len(seen) - held :]
        return seen[: len(seen) - held], False

    def flush(self) -> str:
        """Returns what was held back, once nothing more comes."""
        held, self._buffer = ("" if self.reveal else self._buffer), ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Returns the stop sequence that is complete first; of several, the one that begins first.

        The buffer may have a whole one, from when none ended the text.
        """
        known = len(self._buffer)
        matches = [
            (start + len(each), start, each)
            for each in self._sequences
            if (start := text.find(each, max(0, known - len(each) + 1))) >= 0
        ]
        if not matches:
            return None
        _, start, sequence = min(matches)
        return start, sequence

    def _held(self, text: str) -> int:
        """Returns the length of the longest end of `text` that begins a stop sequence."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(sequence.startswith(end) for sequence in self._sequences):
                return length
        return 0
