"""The texts that end a text, looked for as it grows."""

from collections.abc import Sequence

from tgi_server.router.answers.partial_text import beginning_held


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

        may_end: stop sequences that are complete with this piece count; ones that begin in it always do.
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
