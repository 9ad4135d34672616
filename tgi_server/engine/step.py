"""A step that has been started, its results, and the end of sequences whose last token it brings."""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from tgi_server.contract import FinishReason
from tgi_server.engine.batch import RunningBatch
from tgi_server.engine.sampling import PendingTokens, Tokens
from tgi_server.engine.sequence import PromptTokens, RunningSequence
from tgi_server.engine.speculation import DraftCheck
from tgi_server.grammar import LimitedThoughts


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens at one position, most likely first."""

    ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Generation:
    """A token that one request got from a step. A request with accepted drafts has several of these, in order.

    jump_forward: tokens after `token_id` that the request's grammar forces. hidden: indices of tokens that are not part
    of the text; index 0 is `token_id`, 1 the first jump-forward token. error: why the request cannot continue.
    drafted: True if the token was a draft that was accepted.
    """

    request_id: int
    token_id: int
    jump_forward: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)
    error: str | None = None
    drafted: bool = False
    logprob: float | None = None
    top_tokens: TopTokens | None = None
    prompt_tokens: PromptTokens | None = None
    finish_reason: FinishReason | None = None


_Appended = tuple[Generation, RunningSequence]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The generations of a step, and its times in nanoseconds.

    drafted, accepted: how many tokens were drafted, and how many of them were right.
    """

    generations: list[Generation]
    forward_ns: int
    total_ns: int
    drafted: int = 0
    accepted: int = 0


class Step:
    """A step that has been started.

    batch_size: sequences in the batch. retired: those that ended with this step have left it.
    """

    def __init__(
        self,
        batch: RunningBatch,
        sequences: list[RunningSequence],
        pending: PendingTokens | None,
        eos: Collection[int],
        forward_ns: int,
        started_ns: int,
        check: DraftCheck | None = None,
    ) -> None:
        """sequences: those that get a token. eos: tokens that end a sequence. check: checks drafts, if any."""
        self._batch = batch
        self._sequences = sequences
        self._pending = pending
        self._eos = eos
        self._ended: list[RunningSequence] = []
        self.batch_size = len(batch)
        self.retired = False
        self._forward_ns = forward_ns
        self._started_ns = started_ns
        self._check = check
        self._generations: list[Generation] | None = None
        self._budget = 0

    def synchronize(self) -> None:
        """Waits until `collect` has nothing to wait for. Changes nothing, and may be called in any thread."""
        if self._pending is not None:
            self._pending.synchronize()

    def collect(self) -> StepResult:
        """Returns `result`, and lets the sequences that end with it leave the batch."""
        result = self.result()
        self.retire()
        return result

    def result(self) -> StepResult:
        """Waits for the step's tokens. Call it once, in the order of starting.

        It has tokens of sequences that were taken from the batch after the step was started, too, but none of those
        that ended with an earlier step.
        """
        generations = self.resolve()
        drafts = self._check.drafts if self._check else ()
        return StepResult(
            generations,
            self._forward_ns,
            time.perf_counter_ns() - self._started_ns,
            drafted=sum(len(draft.tokens) for draft in drafts),
            accepted=sum(draft.accepted for draft in drafts),
        )

    def retire(self) -> None:
        """Lets the sequences that ended with this step, whose tokens have been waited for, leave the batch.

        Shards that compute a model together have to do so between the same two steps.
        """
        self.retired = True
        for sequence in self._sequences:
            if isinstance(sequence.constraint, LimitedThoughts) and sequence.constraint.done:
                sequence.constraint = sequence.constraint.grammar
        if self._ended:
            with torch.inference_mode():
                self._batch.drop([sequence.request_id for sequence in self._ended if self._batch.holds(sequence)])

    @torch.inference_mode()
    def resolve(self) -> list[Generation]:
        """Waits for the step's tokens and appends them to their sequences, once. Returns them, as `result` does."""
        if self._generations is None:
            self._generations = [] if self._pending is None else self._take(self._pending.wait())
        return self._generations

    def _take(self, tokens: Tokens) -> list[Generation]:
        """Appends the step's tokens to their sequences, and the tokens after accepted drafts. Returns all of them."""
        self._budget = self._batch.jump_forward_budget()
        taken = newest = self._advance(self._sequences, tokens)
        while self._check is not None and (following := self._check.proceed(self._continuing(newest))):
            right = set(following[0])
            for generation, sequence in newest:
                generation.drafted = sequence in right
            newest = self._advance(*following)
            taken = taken + newest
        for draft in self._check.drafts if self._check else ():
            draft.learn()
            if draft.accepted:
                self._batch.skip(draft.sequence, draft.accepted)
        for generation, sequence in taken:
            if generation.jump_forward and not sequence.ended and self._batch.holds(sequence):
                self._batch.leave_row(sequence, 1 + len(generation.jump_forward))
        return [generation for generation, _ in taken]

    def _advance(self, sequences: Sequence[RunningSequence], tokens: Tokens) -> list[_Appended]:
        """Appends the next token of each sequence, and finds those that end. Leaves out sequences that had ended."""
        rows = zip(_generations(tokens, sequences), sequences, strict=True)
        alive = [(row, sequence) for row, sequence in rows if not sequence.ended]
        for generation, sequence in alive:
            if sequence.constraint is None:
                sequence.append([generation.token_id])
                whole = generation.token_id in self._eos and not sequence.stopping.ignore_eos
            else:
                whole = self._follow_grammar(generation, sequence)
            if sequence.fault:
                generation.error = sequence.fault
            if whole:
                generation.finish_reason = FinishReason.EOS_TOKEN
            elif sequence.generated >= sequence.stopping.max_new_tokens:
                generation.finish_reason = FinishReason.LENGTH
            if generation.finish_reason or generation.error:
                sequence.ended = True
                self._ended.append(sequence)
        return alive

    def _continuing(self, taken: Iterable[_Appended]) -> dict[int, int]:
        """Returns the newest tokens, by request id, of the sequences that may get another token in this step."""
        return {
            sequence.request_id: generation.token_id
            for generation, sequence in taken
            if not sequence.ended and not generation.jump_forward and self._batch.holds(sequence)
        }

    def _follow_grammar(self, generation: Generation, sequence: RunningSequence) -> bool:
        """Appends the token and the jump-forward tokens after it. Returns True if they end the text."""
        constraint = sequence.constraint
        assert constraint is not None
        room = min(self._batch.jump_forward_room(sequence), self._budget)
        advance = constraint.advance(generation.token_id, room)
        if not constraint.ended:
            self._budget -= len(advance.jump_forward)
        generation.jump_forward, generation.hidden = advance.jump_forward, advance.hidden
        generation.error = constraint.error
        sequence.append([generation.token_id, *advance.jump_forward])
        return constraint.ended


def _generations(tokens: Tokens, sequences: Sequence[RunningSequence]) -> list[Generation]:
    generations = [
        Generation(sequence.request_id, token_id) for sequence, token_id in zip(sequences, tokens.ids, strict=True)
    ]
    for row, logprob in tokens.logprobs.items():
        generations[row].logprob = logprob
    for row, top in tokens.top_tokens.items():
        generations[row].top_tokens = TopTokens([token for token, _ in top], [logprob for _, logprob in top])
    for generation, sequence in zip(generations, sequences, strict=True):
        generation.prompt_tokens, sequence.prompt_report = sequence.prompt_report, None
    return generations
