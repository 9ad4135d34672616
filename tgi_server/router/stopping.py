"""Stop sequences: texts that end a generation when they appear in it, however they are cut into tokens."""

from collections.abc import Sequence


class StopSequences:
    """Watches one sequence's text as it grows.

    TGI's routes show the stop sequence (`reveal`): text is passed on as it comes. OpenAI's do not: text that may be
    the beginning of a stop sequence is held back until it is certain that it is not.
    """

    __slots__ = ("_buffer", "_longest", "_sequences", "reveal")

    def __init__(self, sequences: Sequence[str], *, reveal: bool) -> None:
        self._sequences = tuple(sequences)
        self._longest = max(map(len, sequences))
        self.reveal = reveal
        # With `reveal`, the end of what was passed on; else what is held back.
        self._buffer = ""

    def contain(self, text: str) -> bool:
        """Whether `text` may be part of a stop sequence; asked of special tokens, whose text is not shown."""
        return any(text in sequence or sequence in text for sequence in self._sequences)

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; returns what may be shown of the text now, and whether a stop sequence is complete."""
        if not text:
            return "", False
        seen = self._buffer + text
        found = self._first(seen)
        if found is not None:
            start, sequence = found
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
        """What was held back, once nothing more comes."""
        held, self._buffer = ("" if self.reveal else self._buffer), ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """The stop sequence that is complete first; of those, the one that begins first."""
        matches = [(start + len(each), start, each) for each in self._sequences if (start := text.find(each)) >= 0]
        if not matches:
            return None
        _, start, sequence = min(matches)
        return start, sequence

    def _held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop sequence."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(sequence.startswith(end) for sequence in self._sequences):
                return length
        return 0
