"""The sequences of the last forward pass, and where in it their tokens are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tgi_server.engine.runners.base import PromptChunk
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.speculation.draft import Draft


@dataclass(frozen=True, slots=True)
class _LogitsPlace:
    """The places of a sequence's logits: those of its own last token, and those of its draft, if it has one.

    length: its tokens before the pass. own, drafted: rows of the pass's logits.
    """

    length: int
    own: int
    draft: Draft | None = None
    drafted: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens of a sequence, from `position` on. first: index of the first among the pass's tokens."""

    sequence: RunningSequence
    position: int
    first: int
    tokens: int


class LastPass:
    """Finds tokens of a pass, and the logits from which the last token of a sequence was chosen.

    chunks: the chunks of prompts that the pass has computed.
    """

    def __init__(self, rows: Sequence[RunningSequence], chunks: Sequence[PromptChunk], drafts: Sequence[Draft]) -> None:
        """rows: the sequences that decode. drafts: those that are checked."""
        self.chunks = chunks
        self._drafts = drafts
        self._places = {sequence: _LogitsPlace(sequence.length, row) for row, sequence in enumerate(rows)}
        self._own = [Span(sequence, sequence.length - 1, row, 1) for row, sequence in enumerate(rows)]
        logits = tokens = len(rows)
        for chunk in chunks:
            self._own.append(Span(chunk.sequence, chunk.start, tokens, len(chunk.tokens)))
            tokens += len(chunk.tokens)
            logits += chunk.logits
            if chunk.completes:
                self._places[chunk.sequence] = _LogitsPlace(chunk.sequence.length, logits - 1)
        self._first_drafted = tokens
        for draft in drafts:
            place = self._places[draft.sequence]
            self._places[draft.sequence] = _LogitsPlace(place.length, place.own, draft, logits)
            logits += len(draft.tokens)

    def row_of(self, sequence: RunningSequence) -> int | None:
        """Returns a row of the pass's logits; None if the sequence got no token, or got more tokens after it."""
        place = self._places.get(sequence)
        if place is None:
            return None
        accepted = place.draft.accepted if place.draft else 0
        if sequence.length != place.length + accepted + 1:
            return None
        return place.drafted + accepted - 1 if accepted else place.own

    def spans(self) -> Iterator[Span]:
        """Yields the tokens that the pass has computed, those of drafts only as far as they were right."""
        yield from self._own
        first = self._first_drafted
        for draft in self._drafts:
            if draft.accepted:
                yield Span(draft.sequence, self._places[draft.sequence].length, first, draft.accepted)
            first += len(draft.tokens)
