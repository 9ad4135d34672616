"""Drafts of the sequences in a step: of each as many tokens as make the text come fastest."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.speculation.costs import StepCosts
from tgi_server.engine.speculation.draft import Acceptance, Draft
from tgi_server.engine.speculation.drafters import Drafter


class Speculation:
    """Plans the drafts of each step, and learns from what becomes of them.

    drafters: the first that has a draft for a sequence is taken.
    costs: of steps, measured at the warm-up; without them nothing is drafted.
    """

    def __init__(self, most: int, drafters: Sequence[Drafter]) -> None:
        """most: drafted tokens of a sequence in one step."""
        self.drafters = drafters
        self.costs: StepCosts | None = None
        self._most = most
        self._acceptance: WeakKeyDictionary[RunningSequence, Acceptance] = WeakKeyDictionary()

    def plan(self, sequences: Sequence[RunningSequence], rows: int, block_size: int) -> list[Draft]:
        """Returns the drafts of a step that computes `rows` tokens besides, and yields a token of each sequence."""
        if self.costs is None:
            return []
        proposed = self._propose(sequences, block_size)
        chances = [draft.acceptance.chance for draft in proposed]
        kept = self.costs.worth([len(draft.tokens) for draft in proposed], chances, rows, len(sequences))
        for draft, tokens in zip(proposed, kept, strict=True):
            del draft.tokens[tokens:]
            if not tokens:
                draft.acceptance.pass_over()
        return [draft for draft in proposed if draft.tokens]

    def _propose(self, sequences: Sequence[RunningSequence], block_size: int) -> list[Draft]:
        drafts: list[Draft] = []
        open_ = list(sequences)
        for drafter in self.drafters:
            most = [min(self._most, each.draft_room(block_size)) for each in open_]
            proposed = list(zip(open_, drafter.propose(open_, most), strict=True))
            drafts += [Draft(each, tokens, self._acceptance_of(each)) for each, tokens in proposed if tokens]
            open_ = [each for each, tokens in proposed if not tokens]
        for draft in drafts:
            draft.cut()
        return [draft for draft in drafts if draft.tokens]

    def _acceptance_of(self, sequence: RunningSequence) -> Acceptance:
        return self._acceptance.setdefault(sequence, Acceptance())
