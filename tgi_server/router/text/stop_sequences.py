"""Finds stop sequences in a growing text."""

from collections.abc import Sequence

from tgi_server.router.answers.partial_text import beginning_held


class StopSequences:
    """Looks for stop sequences in the text of one sequence as it grows.

    TGI's routes include the stop sequence in the text (`reveal`), so text is passed on at once. OpenAI's do not: text
    that may be the beginning of a stop sequence is held back until it is certain that it is not.
    """

    __slots__ = ("_buffer", "_longest", "_sequences", "found", "reveal")

    def __init__(self, sequences: Sequence[str], *, reveal: bool) -> None:
        self._sequences = tuple(sequences)
        self._longest = max(map(len, sequences))
        self.reveal = reveal
        # The stop sequence that ended the text.
        self.found: str | None = None
        # With `reveal`, the end of the text passed on; otherwise the text that is held back.
        self._buffer = ""

    def contain(self, text: str) -> bool:
        """Returns True if `text`, such as a special token's name, is a part of a stop sequence."""
        return any(text in sequence for sequence in self._sequences)

    def feed(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Adds the next piece. Returns the text that may be shown now, and True if a stop sequence is complete.

        may_end: False ignores stop sequences that are complete within this piece; they may still begin in it.
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
        held = max(beginning_held(seen, sequence) for sequence in self._sequences)
        self._buffer = seen[len(seen) - held :]
        return seen[: len(seen) - held], False

    def flush(self) -> str:
        """Returns the text that was held back. Call it at the end of the text."""
        held, self._buffer = ("" if self.reveal else self._buffer), ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Returns start and text of the stop sequence that is complete first; of several, the one that begins first.

        Ignores a stop sequence that is completely in the buffer, from a time when none could end the text.
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
