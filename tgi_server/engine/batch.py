"""The sequences that run together: those in their prompt, and those that decode, each in its row."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from tgi_server.contract import StateSave
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.runners.base import PromptChunk, Runner
from tgi_server.engine.sampling import Sampler, most_logits, top_logits
from tgi_server.engine.sequence import RunningSequence

# Jump-forward tokens of a step in which every sequence has a grammar. More make no text faster, and keep requests that
# come meanwhile waiting.
_JUMP_FORWARD_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """The forward pass of a step, and the sequences that get a token from it.

    decoding: the number of decoding rows, which come first. chunks: the chunks that are computed in the same pass.
    sequences: those that get a token, in the order of their rows, or of the rows that they get once their prompt is
    complete. first_row: the row of the first of them. picked: the indices of their logits among those of the pass.
    """

    decoding: int
    chunks: list[PromptChunk]
    sequences: list[RunningSequence]
    first_row: int
    picked: list[int]

    @property
    def logits(self) -> int:
        """The number of rows of logits that the pass yields, those of drafts left out."""
        return self.decoding + sum(chunk.logits for chunk in self.chunks)

    @property
    def top_logits(self) -> int | None:
        """Returns how many of the largest logits of its sequence's last token a chunk needs at most; None: all."""
        return most_logits(
            None if chunk.all_logits else top_logits(chunk.sequence.sampling, chunk.sequence.report)
            for chunk in self.chunks
        )


class RunningBatch:
    """The rows of the running batch. They stay dense: when a sequence leaves, the last row moves into its place.

    rows: the sequences past their prompt, in row order. prefilling: the others, by request id; among them those that
    have jump-forward tokens to compute before they take a row again.
    """

    def __init__(self, batch_id: int, runner: Runner, sampler: Sampler, max_size: int, cheap_tokens: int) -> None:
        """cheap_tokens: maximum number of tokens for which a step takes about as long as for one."""
        self.id = batch_id
        self.rows: list[RunningSequence] = []
        self.prefilling: dict[int, RunningSequence] = {}
        self._row_of: dict[int, int] = {}
        self._runner = runner
        self._sampler = sampler
        self._max_size = max_size
        self._cheap_tokens = cheap_tokens

    def __len__(self) -> int:
        return len(self.rows) + len(self.prefilling)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._row_of or request_id in self.prefilling

    def holds(self, sequence: RunningSequence) -> bool:
        """Returns True if this object is in the batch; False for another sequence with the same request id."""
        row = self._row_of.get(sequence.request_id)
        return (self.prefilling.get(sequence.request_id) if row is None else self.rows[row]) is sequence

    def request_ids(self) -> list[int]:
        return [*self._row_of, *self.prefilling]

    def join(self, sequence: RunningSequence) -> None:
        """Adds a sequence. Raises InvalidCall if its request is in the batch already, or if the batch is full."""
        if sequence.request_id in self:
            raise InvalidCall(f"request {sequence.request_id} is in the batch already")
        if len(self) >= self._max_size:
            raise InvalidCall(f"the batch is full: it has {self._max_size} sequences")
        self.prefilling[sequence.request_id] = sequence
        self._runner.join(sequence)

    def promote(self, sequence: RunningSequence) -> None:
        """Gives the next row to a sequence whose prompt is computed."""
        del self.prefilling[sequence.request_id]
        sequence.jumping = False
        row = len(self.rows)
        self.rows.append(sequence)
        self._row_of[sequence.request_id] = row
        self._runner.promote(sequence, row)
        self._sampler.add(row, sequence.sampling, sequence.report, sequence.input_ids, sequence.generated_ids)

    def jump_forward_budget(self) -> int:
        """Returns how many jump-forward tokens the next step may compute beside one token of each sequence.

        Those that do not fit are chosen one at a time, like any other token.
        """
        cheap = max(0, self._cheap_tokens - len(self))
        if all(sequence.constraint is not None for sequence in chain(self.rows, self.prefilling.values())):
            return max(_JUMP_FORWARD_AT_ONCE, cheap)
        return cheap

    def jump_forward_room(self, sequence: RunningSequence) -> int:
        """Returns how many jump-forward tokens the sequence may get at once after its next token."""
        return sequence.jump_forward_room(self._runner.block_size) if self._runner.paged else 0

    def jumping(self) -> list[RunningSequence]:
        """Returns the sequences that have jump-forward tokens to compute before they take a row again."""
        return [sequence for sequence in self.prefilling.values() if sequence.jumping and sequence.remaining]

    def leave_row(self, sequence: RunningSequence, tokens: int) -> None:
        """Takes a sequence from its row until its last `tokens` tokens, all but one jump-forward ones, are computed."""
        self._vacate(self._row_of.pop(sequence.request_id))
        self._runner.truncate(len(self.rows))
        sequence.jump(tokens)
        self.prefilling[sequence.request_id] = sequence

    def row_of(self, sequence: RunningSequence) -> int:
        """Returns the row of a sequence past its prompt."""
        return self._row_of[sequence.request_id]

    def skip(self, sequence: RunningSequence, tokens: int) -> None:
        """Advances a sequence by `tokens` drafted tokens more, which are computed; its last token is computed next."""
        self._runner.skip(self.row_of(sequence), tokens, sequence.generated_ids[-1])

    def plan(self, chunks: list[PromptChunk], *, decode: bool) -> ForwardPlan:
        """Plans a step that computes some chunks, and in which every row advances by a token if `decode`."""
        decoding = len(self.rows) if decode else 0
        sequences = self.rows[:decoding]
        picked, end = list(range(decoding)), decoding
        for chunk in chunks:
            end += chunk.logits
            if chunk.completes:
                sequences.append(chunk.sequence)
                picked.append(end - 1)
        return ForwardPlan(decoding, chunks, sequences, 0 if decode else len(self.rows), picked)

    def grant(self, request_id: int, blocks: list[int]) -> None:
        """Appends blocks to a sequence. A sequence that has ended needs none, and is skipped."""
        row = self._row_of.get(request_id)
        sequence = self.prefilling.get(request_id) if row is None else self.rows[row]
        if sequence is not None:
            self._runner.grant(sequence, row, blocks)

    def close(self, request_id: int) -> None:
        """Makes the grammar of a sequence end its text within few tokens. A sequence that has ended is skipped."""
        row = self._row_of.get(request_id)
        sequence = self.prefilling.get(request_id) if row is None else self.rows[row]
        if sequence is not None and sequence.constraint is not None and not sequence.ended:
            sequence.constraint.close()

    def save_state(self, save: StateSave) -> None:
        """Copies the state after all computed tokens of a sequence into a snapshot.

        A state in the middle of the next chunk is copied with that chunk. Sequences that have ended are skipped.
        """
        row = self._row_of.get(save.request_id)
        sequence = self.prefilling.get(save.request_id) if row is None else self.rows[row]
        if sequence is not None and (row is not None or sequence.computed == save.length):
            self._runner.save_state(sequence, save.snapshot)

    def keep(self, request_ids: Iterable[int]) -> None:
        """Forgets all sequences but these."""
        keep = set(request_ids)
        self.drop([request_id for request_id in self.request_ids() if request_id not in keep])

    def drop(self, request_ids: Iterable[int]) -> None:
        """Forgets these sequences. Ids that are not in the batch are ignored."""
        rows = len(self.rows)
        for request_id in request_ids:
            if request_id in self.prefilling:
                self._runner.leave(self.prefilling.pop(request_id))
            elif request_id in self._row_of:
                row = self._row_of.pop(request_id)
                self._runner.leave(self.rows[row])
                self._vacate(row)
        if len(self.rows) < rows:
            self._runner.truncate(len(self.rows))

    def _vacate(self, row: int) -> None:
        last = len(self.rows) - 1
        moved = self.rows.pop()
        if row == last:
            self._sampler.clear(row)
            return
        self.rows[row] = moved
        self._row_of[moved.request_id] = row
        self._runner.move(last, row)
        self._sampler.move(last, row)
