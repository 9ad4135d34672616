"""The paged way to run a model: packed batches, keys and values in blocks, nothing rebuilt per token."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from tgi_server.contract import StoppingParameters
from tgi_server.engine.backends import Backend, PagedModel
from tgi_server.engine.backends.attention.base import TopOnly
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.base import ImageTokens, MakeLora, PassInput
from tgi_server.engine.backends.devices import cache_bytes, forget_peak, taken_by
from tgi_server.engine.backends.lora import AdaptedLinear
from tgi_server.engine.backends.states import SCRATCH_SLOT, SequenceStates
from tgi_server.engine.errors import EngineError, InvalidCall, InvalidImage, NotEnoughMemory
from tgi_server.engine.memory import HOST, copy_to_device, to_device
from tgi_server.engine.models.families import position_limit
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.runners.base import (
    UNBOUNDED_POSITIONS,
    CacheCapacity,
    PromptChunk,
    Runner,
    Sample,
    warm_up_tokens,
    within_positions,
)
from tgi_server.engine.runners.captured_steps import CapturedSteps, StepCapture
from tgi_server.engine.runners.graphs import capture_for, graph_batch_sizes
from tgi_server.engine.runners.hidden_states import HiddenStates
from tgi_server.engine.runners.paged_batch import PagedBatch
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.vision_tower import VisionTower

logger = logging.getLogger(__name__)

# Tokens for whose keys and values memory is taken at the start, and beyond those that have come.
_RESERVED_TOKENS, _TOKENS_AHEAD = 1 << 17, 1 << 14
# No more memory is reserved than the weights take, times this: a small model shall stay small.
_RESERVED_WEIGHTS = 16
# Snapshots of states, for each sequence of the largest batch, and the share of the memory that they may take.
_SNAPSHOTS_OF_ONE, _SNAPSHOT_SHARE = 4, 0.25
# Seconds that the start spends on reserving memory; the rest is taken beside the first requests.
_RESERVE_SECONDS = 0.1


class PagedRunner(Runner):
    """Runs a model over a KV cache of blocks, sequences that decode and chunks of prompts in the same pass.

    companion_bytes: of the keys and values that another model has of each token, in blocks of the same numbers.
    weight_bytes: of the model.
    hidden_states: those of the last pass, if anybody wants them; set before the warm-up.
    most_drafted: tokens that are drafted for a sequence in one step, at most.
    tower: reads the images of prompts; None: there are none. Set before the warm-up.
    """

    paged = True
    companion_bytes = 0
    hidden_states: HiddenStates | None = None
    most_drafted = 0
    tower: VisionTower | None = None

    def __init__(
        self, model: PagedModel, backend: Backend, group: ShardGroup | None = None, weight_bytes: int = 0
    ) -> None:
        """backend: what the model computes with. group: the shards of the model, when this is one of them."""
        super().__init__(backend)
        self.model = model
        self.states = model.states
        self._config: PretrainedConfig = model.source.config
        self._device = model.attention.device
        self.block_size = model.attention.block_size
        self._group = group
        self.weight_bytes = weight_bytes
        self._highest_block = 0  # that a sequence has had
        self._blocks_ahead = 0  # whose memory is taken before they are needed
        self._free_slots: list[int] = []  # for states
        self._captured = CapturedSteps()
        self._uncapturable: dict[str, str] = {}  # why steps have not been captured, by what they are

    def adapt(self, lora: MakeLora) -> list[AdaptedLinear]:
        return self.model.adapt(lora)

    def warm_up(
        self,
        max_batch_size: int,
        max_prefill_tokens: int,
        max_total_tokens: int | None,
        max_batch_total_tokens: int | None,
        adapter_bytes: int = 0,
        sample: Sample | None = None,
    ) -> CacheCapacity:
        size = self.block_size
        max_total_tokens = within_positions(self.model.source, self._config, max_total_tokens)
        limit = max_total_tokens or position_limit(self._config) or UNBOUNDED_POSITIONS
        self._captured = CapturedSteps()
        self._run_largest(max_batch_size, max_prefill_tokens, limit, sample)
        most = max_prefill_tokens + max_batch_size - 1
        with taken_by(self._device) as graphs:
            self._capture(most)
        self._captured = CapturedSteps()
        affordable, snapshots = self._affordable(max_batch_size, graphs.bytes, adapter_bytes)
        useful = max_batch_size * -(-limit // size)
        if max_batch_total_tokens is not None:
            useful = min(useful, -(-max_batch_total_tokens // size))
        num_blocks = min(useful, affordable - 1)
        needed = max_total_tokens or size
        if num_blocks * size < needed:
            both = ", in the model and in the one that drafts" if self.companion_bytes else ""
            both += f", beside the states of {max_batch_size} sequences" if self.states else ""
            lower = "--max-total-tokens or --max-batch-size" if self.states else "--max-total-tokens"
            raise NotEnoughMemory(
                f"the memory left holds the keys and values of {max(0, num_blocks) * size} tokens{both}, but one "
                f"sequence needs {needed}; lower {lower}, or give the cache more memory"
            )
        total = min(limit, num_blocks * size)
        self._allocate(max_batch_size, num_blocks, total, snapshots)
        token_bytes = self.bytes_per_token + self.companion_bytes
        reserved = min(_RESERVED_TOKENS, _RESERVED_WEIGHTS * self.weight_bytes // token_bytes) // size
        self._blocks_ahead = min(reserved, _TOKENS_AHEAD // size)
        self.model.attention.reserve(min(num_blocks, reserved) + 1, 0, _RESERVE_SECONDS)
        self.model.fix_length(total)
        self._capture(most)
        return CacheCapacity(
            max_batch_size,
            num_blocks,
            size,
            max_total_tokens=total,
            max_batch_total_tokens=num_blocks * size,
            num_snapshots=snapshots,
        )

    def _affordable(self, max_batch_size: int, taken: int = 0, adapter_bytes: int = 0) -> tuple[int, int]:
        """Returns how many blocks and snapshots of states there is memory for, the same for all shards.

        States of `max_batch_size` sequences come first. taken, adapter_bytes: bytes that are not for them; the latter
        are free yet, and of each process.
        """
        processes = self._group.local_world_size if self._group else 1
        config = self.backend.config
        free = cache_bytes(self._device, config.memory_fraction, config.cpu_memory, processes, adapter_bytes) - taken
        snapshots = 0
        if self.states is not None:
            slot_bytes = self.states.slot_bytes
            free = max(0, free - (1 + max_batch_size) * slot_bytes)
            snapshots = min(_SNAPSHOTS_OF_ONE * max_batch_size, int(_SNAPSHOT_SHARE * free) // slot_bytes)
            free -= snapshots * slot_bytes
        blocks = free // (self.block_size * (self.bytes_per_token + self.companion_bytes))
        return (self._group.minimum(blocks), self._group.minimum(snapshots)) if self._group else (blocks, snapshots)

    @property
    def bytes_per_token(self) -> int:
        return self.model.attention.token_bytes

    def share_block_size(self, other: "PagedRunner") -> None:
        """Gives both runners, which have no blocks yet, the same block size: attention in plain torch takes any."""
        plain, fixed = (self, other) if type(self.model.attention) is GatherAttention else (other, self)
        plain.model.attention.block_size = plain.block_size = fixed.block_size

    def follow(self, capacity: CacheCapacity, max_prefill_tokens: int) -> None:
        """Warms up beside another model, for the same sequences in blocks of the same numbers.

        What it computes of prompts is not captured: drafters may have inputs of their own there.
        """
        self._captured = CapturedSteps()
        self._run_largest(capacity.max_batch_size, max_prefill_tokens, capacity.max_total_tokens, None)
        self._allocate(capacity.max_batch_size, capacity.num_blocks, capacity.max_total_tokens)
        self.model.fix_length(capacity.max_total_tokens)
        self._capture()

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
            inputs = self._with_images(self.tower, inputs, decoding, chunks)
        captured = self._captured.prompts.run(inputs) if chunks and self._captured.prompts else None
        logits = self.model.forward(inputs) if captured is None else captured
        batch.advance(decoding)
        return logits

    def _with_images(
        self, tower: VisionTower, inputs: PassInput, decoding: int, chunks: Sequence[PromptChunk]
    ) -> PassInput:
        """Returns the input of a pass with the images of its chunks. A sequence whose image is at fault notes that."""
        if tower.two_way:
            _attend_both_ways(inputs, chunks, in_windows=tower.two_way == "windows")
        rotary = self._rotary(decoding, chunks) if tower.mrope else None
        rows, embeddings, added = [], [], []
        for span, chunk in zip(inputs.metadata.chunks, chunks, strict=True):
            for image in chunk.sequence.placed.placed if chunk.sequence.placed else ():
                first, end = image.within(chunk.start, chunk.start + len(chunk.tokens))
                if first == end or chunk.sequence.fault:
                    continue
                try:
                    features = image.features(tower)
                except InvalidImage as fault:
                    chunk.sequence.fault = str(fault)
                    continue
                rows.append(image.places[first:end] - chunk.start + span.start)
                embeddings.append(features.embeddings[first:end])
                added.append([each[first:end] for each in features.added])
                if end == len(image.places):
                    image.release()
        if not rows:
            return replace(inputs, rotary=rotary)
        on_device = copy_to_device(torch.cat(rows), self._device)
        images = ImageTokens(on_device, torch.cat(embeddings), [torch.cat(each) for each in zip(*added, strict=True)])
        filler = max(self._config.get_text_config(decoder=True).pad_token_id or 0, 0)
        tokens = inputs.tokens.index_fill(0, on_device, filler)  # the model may know no token of that number
        return replace(inputs, tokens=tokens, images=images, rotary=rotary)

    def _rotary(self, decoding: int, chunks: Sequence[PromptChunk]) -> Tensor | None:
        """Returns the rotary positions of a pass, [tokens] int64, or [3, tokens] if it has tokens of images.

        None: they are the tokens' positions.
        """
        if not self._batch.turned(decoding) and all(chunk.sequence.placed is None for chunk in chunks):
            return None
        own = []
        for chunk in chunks:
            stop = chunk.start + len(chunk.tokens)
            placed = chunk.sequence.placed
            own.append(torch.arange(chunk.start, stop).expand(3, -1) if placed is None
                       else placed.rotary(chunk.start, stop))  # fmt: skip
        positions = torch.cat(own, 1)
        decoded = self._batch.rotary(decoding)
        assert decoded is not None
        if bool((positions == positions[0]).all()):
            return torch.cat([decoded, copy_to_device(positions[0].contiguous(), self._device)])
        return torch.cat([decoded.expand(3, -1), copy_to_device(positions.contiguous(), self._device)], 1)

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

    def join(self, sequence: RunningSequence) -> None:
        self._check(sequence, sequence.blocks)
        if self.states is not None:
            self._take_slot(sequence, self.states)
        if sequence.copy:
            self.model.attention.copy(sequence.copy.source, sequence.copy.target, sequence.copy.tokens)

    def _take_slot(self, sequence: RunningSequence, states: SequenceStates) -> None:
        """Gives a sequence a slot, with the state that its snapshot has, or none."""
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

    def leave(self, sequence: RunningSequence) -> None:
        if sequence.state_slot:
            self._free_slots.append(sequence.state_slot)
            sequence.state_slot = SCRATCH_SLOT

    def promote(self, sequence: RunningSequence, row: int) -> None:
        delta = sequence.placed.rope_delta if sequence.placed else 0
        self._batch.place(row, sequence.length, sequence.blocks, sequence.adapter, sequence.state_slot, delta)

    def place(self, sequence: RunningSequence, row: int, position: int) -> None:
        """Gives the row behind the last one to a sequence without its adapter; its next token stands at `position`."""
        self._batch.place(row, position, sequence.blocks)

    def accept(self, first_row: int, token_ids: Tensor) -> None:
        if token_ids is self.argmax_ids:
            return  # the captured step has done it
        self._batch.tokens[first_row : first_row + len(token_ids)] = token_ids

    def skip(self, row: int, tokens: int, token_id: int) -> None:
        if self.states is not None:
            self.states.accept(self._batch.state_slots[row], tokens)
        self._batch.skip(row, tokens, token_id)

    def grant(self, sequence: RunningSequence, row: int | None, blocks: list[int]) -> None:
        self._check(sequence, blocks)
        first = len(sequence.blocks)
        sequence.blocks.extend(blocks)
        if row is not None:
            self._batch.block_tables.extend(row, first, blocks)

    def move(self, source: int, target: int) -> None:
        self._batch.move(source, target)

    def truncate(self, rows: int) -> None:
        self._batch.truncate(rows)

    def _check(self, sequence: RunningSequence, blocks: list[int]) -> None:
        """Raises InvalidCall for blocks that were never handed out: kernels write to whatever block they are given."""
        if not blocks:
            return
        highest = max(blocks)
        if not 0 < min(blocks) <= highest <= self._batch.num_blocks:
            raise InvalidCall(
                f"request {sequence.request_id} was given block {min(blocks) if min(blocks) < 1 else highest}; "
                f"blocks go from 1 to {self._batch.num_blocks}"
            )
        if highest > self._highest_block:
            self._highest_block = highest
            self.model.attention.reserve(highest + 1, self._blocks_ahead)

    def _decode_in_one(self, rows: int, top: TopOnly | None) -> tuple[Tensor, Tensor | None] | None:
        """Returns logits and the argmax of each row, its next input; None if no step in one call fits.

        It is a captured step, or on a CPU a kernel call, whose argmax is None where not all rows are greedy,
        or one has a mask.
        """
        adapted = bool(self._batch.adapted(rows))
        graphs = self._captured.adapted if adapted else self._captured.decoding
        if graphs and (outputs := graphs.run(rows)) is not None:
            return outputs[0], outputs[1]
        return self.model.decode(rows, self._batch.longest(rows), top, adapted=adapted)

    def _allocate(self, max_batch_size: int, num_blocks: int, max_total_tokens: int, snapshots: int = 0) -> None:
        self._highest_block = 0
        self.model.allocate(num_blocks + 1)
        if self.states is not None:
            self.states.allocate(1 + max_batch_size, snapshots)
            self._free_slots = list(range(max_batch_size, 0, -1))
        mrope = self.tower is not None and self.tower.mrope
        self._batch = batch = PagedBatch(
            max_batch_size, num_blocks, max_total_tokens, self.block_size, self._device, self.most_drafted, mrope=mrope
        )
        tables = batch.block_tables.table
        rows = batch.tokens, batch.positions, tables, batch.adapters, batch.rope_deltas, batch.row_slots
        self.model.attach_rows(*rows)
        if self.hidden_states is not None:
            self.model.tap(self.hidden_states.indices, self.hidden_states.keep)

    def _capture(self, most: int = 0) -> None:
        """Captures steps as CUDA graphs. most: tokens of a step with prompts; 0: none are captured."""
        capture = capture_for(self.model.attention)
        sizes = graph_batch_sizes(self.backend.config.cuda_graphs, len(self._batch))
        if not sizes:
            return
        if capture is None:
            if self._device != HOST:
                self._note_uncaptured("decoding", "attention in plain torch computes what the longest sequence needs")
            return
        if self.hidden_states is not None:
            capture = self.hidden_states.capturing(capture)
        steps = StepCapture(self._batch, self.model.forward, capture, self._group, self._uncapturable)
        captured = self._captured = CapturedSteps(steps.decoding(sizes))
        if captured.decoding and self.model.adapted:
            captured.adapted = steps.decoding(sizes, any_adapters=True)
        # The block table of the longest sequence has room for as many drafted tokens as a block has.
        if captured.decoding and self.states is None and 0 < self.most_drafted <= self.block_size:
            captured.drafting = steps.drafting(sizes)
        alone = "with states" if self.states is not None else "over latents"
        one_by_one = self.states is not None or not self.model.attention.any_prompts
        if captured.decoding and most and not one_by_one:
            captured.prompts = steps.prompts(most, self.block_size)
        for what, fault in self._uncapturable.items():
            self._note_uncaptured(what, fault)
        if captured.decoding and most and one_by_one and self._device != HOST:
            self._note_uncaptured("computing prompts", f"layers {alone} are computed prompt by prompt")

    def _note_uncaptured(self, what: str, reason: str) -> None:
        fallback = f"{what} runs without CUDA graphs: {reason}"
        if fallback not in self.fallbacks:
            self.fallbacks.append(fallback)

    def _run_largest(self, max_batch_size: int, max_prefill_tokens: int, limit: int, sample: Sample | None) -> None:
        """Runs the largest pass with the backend, or where its kernels fail, with attention in plain torch.

        limit: most tokens of one sequence.
        """
        largest = max_batch_size, max_prefill_tokens, limit, sample
        try:
            self._run_prompts(*largest)
        except (EngineError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of a compiler, of a driver: a kernel that cannot be had for some sizes
            attention = self.model.attention
            plain = type(attention) is GatherAttention or not isinstance(attention, GatherAttention)
            if plain or self._group is not None:
                raise
            self._attend_in_plain_torch(error)
            self._run_prompts(*largest)

    def _attend_in_plain_torch(self, fault: Exception) -> None:
        failed = self.model.attention
        name = type(failed).__name__
        fallback = f"attention runs in plain torch, which is slow: {name} fails ({type(fault).__name__}: {fault})"
        logger.warning(fallback)
        self.fallbacks.append(fallback)
        self.model.attention = GatherAttention(failed.shape, self._device, failed.dtype, failed.kv_format)
        self.model.attention.block_size = self.block_size  # which has been reported already

    def _run_prompts(self, max_batch_size: int, max_prefill_tokens: int, limit: int, sample: Sample | None) -> None:
        tokens = warm_up_tokens(self._config, max_prefill_tokens, fixed_memory=self.backend.fixed_memory)
        blocks = list(range(1, -(-tokens // self.block_size) + 1))
        self._allocate(max_batch_size, len(blocks), tokens + 1)
        forget_peak(self._device)
        self.model.fix_length(tokens + 1)
        self.run_prompt(tokens, blocks)
        self.truncate(0)
        if sample is not None:
            longest = max(tokens + 1, min(limit, self._affordable(max_batch_size)[0] * self.block_size))
            self._allocate(max_batch_size, len(blocks), longest)
            self.model.fix_length(longest)
            sample(self._run_last_chunk(tokens, longest, blocks, max_batch_size))

    def _run_last_chunk(self, tokens: int, longest: int, blocks: list[int], max_batch_size: int) -> Tensor:
        """Runs the last `tokens` tokens of the longest prompt, while all other rows decode. Returns all rows' logits.

        All of the prompt's keys stand in the blocks of these tokens, over and over: so a long prompt takes no more
        memory than they do, and what is made of its keys on the way takes as much as it ever does.
        """
        repeated = -(-longest // self.block_size)
        table = (blocks * -(-repeated // len(blocks)))[:repeated]
        sequence = RunningSequence(0, [0] * longest, StoppingParameters(1), blocks=table, computed=longest - tokens)
        return self.forward(max_batch_size - 1, [PromptChunk.next_of(sequence, tokens)])


def _attend_both_ways(inputs: PassInput, chunks: Sequence[PromptChunk], *, in_windows: bool) -> None:
    """Notes in a pass's metadata how far the tokens of images look. in_windows: in layers with a window alone."""
    metadata = inputs.metadata
    found = [
        None if chunk.sequence.placed is None else chunk.sequence.placed.ends(chunk.start, span.kv_length)
        for span, chunk in zip(metadata.chunks, chunks, strict=True)
    ]
    if all(ends is None for ends in found):
        return
    metadata.ends = inputs.positions.to(torch.int32) + 1
    metadata.ends_in_windows = in_windows
    for span, ends in zip(metadata.chunks, found, strict=True):
        if ends is not None:
            metadata.ends[span.start : span.start + span.length] = copy_to_device(ends, metadata.ends.device)
