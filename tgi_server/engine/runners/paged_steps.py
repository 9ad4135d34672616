"""The steps of a paged model: one forward pass for the sequences that decode and for chunks of prompts.

Keys and values stay in blocks, the batch in preallocated tensors; nothing is rebuilt per token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from tgi_server.engine.backends import Backend, PagedModel
from tgi_server.engine.backends.base import MakeLora, TopOnly
from tgi_server.engine.backends.lora import AdaptedLinear
from tgi_server.engine.backends.states import SCRATCH_SLOT, SequenceStates
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.memory import to_device
from tgi_server.engine.runners.base import PromptChunk, Runner
from tgi_server.engine.runners.captured_steps import CapturedSteps
from tgi_server.engine.runners.hidden_states import HiddenStates
from tgi_server.engine.runners.image_input import with_images
from tgi_server.engine.runners.paged_batch import PagedBatch
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.vision.tower import VisionTower


class PagedSteps(Runner):
    """Runs a model's steps over a KV cache of blocks, once `allocate` has made room for a batch.

    hidden_states: those of the last pass, if a drafter reads them; set before `allocate`.
    most_drafted: maximum number of drafted tokens of a sequence in one step.
    tower: reads the images of prompts; None: there are none. Set before `allocate`.
    """

    paged = True
    hidden_states: HiddenStates | None = None
    most_drafted = 0
    tower: VisionTower | None = None

    def __init__(self, model: PagedModel, backend: Backend) -> None:
        """backend: the backend that computes the model."""
        super().__init__(backend)
        self.model = model
        self.states = model.states
        config: PretrainedConfig = model.source.config
        self._config = config
        # The token that replaces image tokens, for which the model may have no embedding.
        self._filler = max(config.get_text_config(decoder=True).pad_token_id or 0, 0)
        self._device = model.attention.device
        self.block_size = model.attention.block_size
        self._highest_block = 0  # that a sequence has had
        self._blocks_ahead = 0  # whose memory is taken before they are needed
        self._free_slots: list[int] = []  # for states
        self._captured = CapturedSteps()

    def allocate(self, max_batch_size: int, num_blocks: int, max_total_tokens: int, snapshots: int = 0) -> None:
        """Allocates blocks 1 .. num_blocks and slots for a new batch. max_total_tokens: limit of a sequence."""
        self._highest_block = 0
        self.model.allocate(num_blocks + 1)
        if self.states is not None:
            self.states.allocate(1 + max_batch_size, snapshots)
            self._free_slots = list(range(max_batch_size, 0, -1))
        mrope = self.tower is not None and self.tower.mrope
        self._batch = batch = PagedBatch(
            max_batch_size, num_blocks, max_total_tokens, self.model.attention, self.most_drafted, mrope=mrope
        )
        tables = batch.block_tables.table
        rows = batch.tokens, batch.positions, tables, batch.adapters, batch.rope_deltas, batch.row_slots
        self.model.attach_rows(*rows)
        if self.hidden_states is not None:
            self.model.tap(self.hidden_states.indices, self.hidden_states.keep)

    def forward(self, decoding: int, chunks: list[PromptChunk], top: TopOnly | None = None) -> Tensor:
        batch = self._batch
        batch.block_tables.flush()
        if self.states is not None:
            self.states.begin_pass()
        decoded = None if chunks else self._decode_in_one(decoding, top)
        if decoded is not None:
            logits, self.argmax_ids = decoded
            batch.count_pass()
            return logits
        self.argmax_ids = None
        inputs = batch.mixed_input(decoding, chunks, top) if chunks else batch.decode_input(decoding, top)
        if chunks and self.tower is not None:
            inputs = with_images(self.tower, inputs, batch, decoding, chunks, self._filler)
        captured = self._captured.prompts.run(inputs) if chunks and self._captured.prompts else None
        logits = self.model.forward(inputs) if captured is None else captured
        batch.advance(decoding)
        return logits

    def _decode_in_one(self, rows: int, top: TopOnly | None) -> tuple[Tensor, Tensor | None] | None:
        """Returns logits, and the argmax of each row, which is already the row's next token; None if the step cannot
        be done in one call.

        One call is a captured step, or on a CPU a kernel call, whose argmax is None where not all rows are greedy,
        or one has a mask.
        """
        adapted = bool(self._batch.adapted(rows))
        if (decoded := self._captured.decode(rows, top, adapted=adapted)) is not None:
            return decoded
        return self.model.decode(rows, self._batch.longest(rows), top, adapted=adapted)

    def join(self, sequence: RunningSequence) -> None:
        self._check(sequence.blocks)
        if self.states is not None:
            self._take_slot(sequence, self.states)
        if sequence.copy:
            self.model.attention.copy(sequence.copy.source, sequence.copy.target, sequence.copy.tokens)

    def promote(self, sequence: RunningSequence, row: int) -> None:
        delta = sequence.placed.rope_delta if sequence.placed else 0
        self._batch.place(row, sequence.length, sequence.blocks, sequence.adapter, sequence.state_slot, delta)

    def accept(self, first_row: int, token_ids: Tensor) -> None:
        if token_ids is self.argmax_ids:
            return  # the step in one call has written them
        self._batch.tokens[first_row : first_row + len(token_ids)] = token_ids

    def grant(self, sequence: RunningSequence, row: int | None, blocks: list[int]) -> None:
        self._check(blocks)
        first = len(sequence.blocks)
        sequence.blocks.extend(blocks)
        if row is not None:
            self._batch.block_tables.extend(row, first, blocks)

    def skip(self, row: int, tokens: int, token_id: int) -> None:
        if self.states is not None:
            self.states.accept(self._batch.state_slots[row], tokens)
        self._batch.skip(row, tokens, token_id)

    def move(self, source: int, target: int) -> None:
        self._batch.move(source, target)

    def truncate(self, rows: int) -> None:
        self._batch.truncate(rows)

    def leave(self, sequence: RunningSequence) -> None:
        if sequence.state_slot:
            self._free_slots.append(sequence.state_slot)
            sequence.state_slot = SCRATCH_SLOT

    def check_blocks(self, blocks: Sequence[int]) -> None:
        """Raises InvalidCall for blocks that do not exist: kernels write to whatever block they are given."""
        low, high = min(blocks, default=1), max(blocks, default=1)
        if not 0 < low <= high <= self._batch.num_blocks:
            most = self._batch.num_blocks
            raise InvalidCall(f"block {low if low < 1 else high} does not exist; blocks go from 1 to {most}")

    def _check(self, blocks: list[int]) -> None:
        """Raises InvalidCall for blocks that do not exist. Allocates memory for the blocks."""
        self.check_blocks(blocks)
        if (highest := max(blocks, default=0)) > self._highest_block:
            self._highest_block = highest
            self.model.attention.reserve(highest + 1, self._blocks_ahead)

    def _take_slot(self, sequence: RunningSequence, states: SequenceStates) -> None:
        """Gives a sequence a slot, with the state of its snapshot, or empty."""
        if bool(sequence.computed) != bool(sequence.snapshot):
            raise InvalidCall(
                f"request {sequence.request_id}: {sequence.computed} cached tokens with snapshot {sequence.snapshot}; "
                "a state belongs to the tokens before it"
            )
        sequence.state_slot = self._free_slots.pop()
        if sequence.snapshot:
            states.copy(states.slot_of(sequence.snapshot), sequence.state_slot)
        else:
            states.clear(sequence.state_slot)

    def save_state(self, sequence: RunningSequence, snapshot: int) -> None:
        if self.states is None:
            super().save_state(sequence, snapshot)
        else:
            self.states.copy(sequence.state_slot, self.states.slot_of(snapshot))

    @property
    def captured_drafts(self) -> list[tuple[int, int]]:
        sizes = self._captured.drafting.sizes if self._captured.drafting else ()
        return [(rows, rows * (1 + self.most_drafted)) for rows in sizes]

    def forward_drafts(self, decoding: int, drafts: Sequence[tuple[int, Tensor]]) -> Tensor | None:
        self._batch.block_tables.flush()
        captured = self._captured.drafting
        if captured is None or decoding > captured.sizes[-1] or self._batch.adapted(decoding):
            return None
        self.argmax_ids = None
        self._batch.draft(drafts)
        outputs = captured.run(decoding)
        assert outputs is not None
        logits = outputs[0]
        width = logits.shape[1]
        order = [row * width for row in range(decoding)]
        order += [row * width + 1 + place for row, tokens in drafts for place in range(len(tokens))]
        rows = to_device(order, torch.int64, self._device)
        if self.hidden_states is not None:
            self.hidden_states.select(rows)
        self._batch.advance(decoding)
        return logits.flatten(0, 1).index_select(0, rows)

    def place(self, sequence: RunningSequence, row: int, position: int) -> None:
        """Gives the first free row to a sequence, without its adapter. position: the position of its next token."""
        self._batch.place(row, position, sequence.blocks)

    def adapt(self, lora: MakeLora) -> list[AdaptedLinear]:
        return self.model.adapt(lora)
