"""A sequence's drafted tokens, and which of them are those that would have been chosen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tgi_server.engine.memory import to_device
from tgi_server.engine.runners.base import PromptChunk
from tgi_server.engine.sampling import PendingTokens, Tokens, is_greedy, top_logits
from tgi_server.engine.sequence import RunningSequence

# What earlier drafts have shown decays with each further draft, and more slowly with each step in which none was worth
# its time: sooner or later one is tried again.
_DECAY_WHEN_CHECKED = 0.9
_DECAY_WHEN_SKIPPED = 0.99
# A sequence begins as if half a drafted token had been checked, and half of that accepted; or more, if others' were.
_PRIOR_CHECKED = 0.5
_PRIOR_CHANCE = 0.5


@dataclass(slots=True)
class Acceptance:
    """The share of a sequence's drafted tokens that were accepted lately. Tokens after a wrong one do not count.

    expected: the share that is assumed before any token has been checked. of_all: the share of all sequences, which is
    updated with this one.
    """

    accepted: float = 0.0
    checked: float = 0.0
    expected: float = _PRIOR_CHANCE
    of_all: "Acceptance | None" = None

    def of_another(self) -> "Acceptance":
        """Returns the acceptance of a new sequence, where this is the one of all."""
        return Acceptance(expected=max(_PRIOR_CHANCE, self.chance), of_all=self)

    @property
    def chance(self) -> float:
        """Returns the probability that a drafted token is right, if those before it are."""
        return (self.accepted + self.expected * _PRIOR_CHECKED) / (self.checked + _PRIOR_CHECKED)

    def learn(self, accepted: int, refused: int) -> None:
        self._decay(_DECAY_WHEN_CHECKED)
        self.accepted += accepted
        self.checked += accepted + refused
        if self.of_all is not None:
            self.of_all.learn(accepted, refused)

    def skip(self) -> None:
        """Notes that a draft was not worth checking."""
        self._decay(_DECAY_WHEN_SKIPPED)

    def _decay(self, factor: float) -> None:
        self.accepted *= factor
        self.checked *= factor


@dataclass(slots=True)
class Draft:
    """Drafted tokens of a sequence, which are computed in the step that chooses its next token.

    accepted: the number of tokens known to be right. refused: True if the token after them is known to be wrong.
    """

    sequence: RunningSequence
    tokens: list[int]
    acceptance: Acceptance = field(default_factory=Acceptance)
    accepted: int = 0
    refused: bool = False

    @property
    def chunk(self) -> PromptChunk:
        """The drafted tokens as a chunk of the forward pass: after the sequence's last token, with logits for each."""
        return PromptChunk(self.sequence, torch.tensor(self.tokens), self.sequence.length, all_logits=True)

    @property
    def top_logits(self) -> int | None:
        """Returns how many of the largest of each token's logits are needed to check it; None: all."""
        sequence = self.sequence
        return None if sequence.constraint is not None else top_logits(sequence.sampling, sequence.report)

    @property
    def is_greedy(self) -> bool:
        """Returns True if it needs the largest of each token's logits, and at most how likely it is."""
        sequence = self.sequence
        return (
            sequence.constraint is None
            and is_greedy(sequence.sampling)
            and not sequence.report.top_n_tokens
            and not sequence.report.scored_token_ids
        )

    def cut(self) -> None:
        """Drops the tokens from the first one on that the sequence's grammar forbids."""
        if self.sequence.constraint is not None:
            del self.tokens[self.sequence.constraint.allowed(self.tokens) :]

    def accept(self, token: int) -> bool:
        """Takes the token that was chosen. Returns True if it is the one that was drafted next."""
        if self.accepted == len(self.tokens):
            return False
        self.refused = self.tokens[self.accepted] != token
        self.accepted += not self.refused
        return not self.refused

    def learn(self) -> None:
        """Updates the sequence's acceptance rate, by which its next drafts get their lengths."""
        self.acceptance.learn(self.accepted, int(self.refused))


# Chooses the next token of some sequences from their logits, [sequences, vocab_size], as any step does.
Choose = Callable[[Tensor, Sequence[RunningSequence]], Tokens]


class DraftCheck:
    """Checks the drafts of a step, one token at a time.

    A drafted token is right when it is the token that was chosen. Then the logits after it are those of the next step,
    and the next token is chosen from them in the usual way. So the text is the same with drafts and without, whatever
    the sampling options are.
    """

    def __init__(
        self, drafts: Sequence[Draft], logits: Tensor, choose: Choose, greedy: PendingTokens | None = None
    ) -> None:
        """logits: [drafted tokens, vocab_size], one draft's after the other's.

        greedy: the argmax of each row, where all drafts are greedy, with its log-probability where a sequence
            reports that: then nothing else has to be computed.
        """
        self.drafts = drafts
        self._logits = logits
        self._choose = choose
        self._greedy = greedy
        self._going = list(drafts)
        self._first: dict[int, int] = {}  # row of the logits of each draft's first token, by request id
        row = 0
        for draft in drafts:
            self._first[draft.sequence.request_id] = row
            row += len(draft.tokens)

    def proceed(self, chosen: dict[int, int]) -> tuple[list[RunningSequence], Tokens] | None:
        """Takes the tokens that were chosen last, by request id, of the sequences that go on.

        Returns the sequences whose drafts were right, with their next tokens; None if no draft was.
        """
        self._going = [
            draft
            for draft in self._going
            if (token := chosen.get(draft.sequence.request_id)) is not None and draft.accept(token)
        ]
        if not self._going:
            return None
        rows = [self._first[draft.sequence.request_id] + draft.accepted - 1 for draft in self._going]
        sequences = [draft.sequence for draft in self._going]
        if self._greedy is not None:
            greedy = self._greedy.wait()
            logprobs = {place: greedy.logprobs[row] for place, row in enumerate(rows) if row in greedy.logprobs}
            return sequences, Tokens([greedy.ids[row] for row in rows], logprobs, {})
        logits = self._logits.index_select(0, to_device(rows, torch.int64, self._logits.device))
        return sequences, self._choose(logits, sequences)
