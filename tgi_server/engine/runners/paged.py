"""The warm-up of a paged model: the largest step, the size of the KV cache, and CUDA graphs."""

import logging
import time

import torch
from torch import Tensor

from tgi_server.contract import StoppingParameters
from tgi_server.engine.backends import Backend, PagedModel
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.devices import cache_bytes, forget_peak, taken_by
from tgi_server.engine.errors import EngineError, NotEnoughMemory
from tgi_server.engine.memory import HOST
from tgi_server.engine.models.families import position_limit
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.runners.base import (
    UNBOUNDED_POSITIONS,
    CacheCapacity,
    PromptChunk,
    Sample,
    warm_up_tokens,
    within_positions,
)
from tgi_server.engine.runners.caps import DEFAULT_SEQUENCES, MEASURED_TOKENS, Caps, caps_of_gpu
from tgi_server.engine.runners.captured_steps import CapturedSteps, StepCapture
from tgi_server.engine.runners.graphs import capture_for, graph_batch_sizes
from tgi_server.engine.runners.paged_steps import PagedSteps
from tgi_server.engine.sequence import RunningSequence

logger = logging.getLogger(__name__)

# Tokens for whose keys and values memory is allocated at the start, and ahead of the tokens in use.
_RESERVED_TOKENS, _TOKENS_AHEAD = 1 << 17, 1 << 14
# Memory is reserved up to this many times the size of the weights: the process of a small model shall stay small.
_RESERVED_WEIGHTS = 16
# Snapshots of states, for each sequence of the largest batch, and the share of the memory that they may take.
_SNAPSHOTS_OF_ONE, _SNAPSHOT_SHARE = 4, 0.25
# Seconds that the start spends on reserving memory; the rest is allocated while the first requests are served.
_RESERVE_SECONDS = 0.1


class PagedRunner(PagedSteps):
    """Runs a paged model. Sizes its cache by the memory that is left, and captures its steps if possible.

    companion_bytes: bytes per token of another model's keys and values, which are in blocks with the same ids.
    weight_bytes: size of the model's weights.
    """

    companion_bytes = 0

    def __init__(
        self, model: PagedModel, backend: Backend, group: ShardGroup | None = None, weight_bytes: int = 0
    ) -> None:
        """backend: the backend that computes the model. group: the shards of the model; None for a single shard."""
        super().__init__(model, backend)
        self._group = group
        self.weight_bytes = weight_bytes
        self._uncapturable: dict[str, str] = {}  # why steps have not been captured, by what they are

    def warm_up(
        self,
        max_batch_size: int | None,
        max_prefill_tokens: int | None,
        max_total_tokens: int | None,
        max_batch_total_tokens: int | None,
        adapter_bytes: int = 0,
        sample: Sample | None = None,
    ) -> CacheCapacity:
        size = self.block_size
        max_total_tokens = within_positions(self.model.source, self._config, max_total_tokens)
        limit = max_total_tokens or position_limit(self._config) or UNBOUNDED_POSITIONS
        self._captured = CapturedSteps()
        if not (max_batch_size and max_prefill_tokens):
            caps = self._caps(limit, adapter_bytes) if self.backend.fixed_memory else Caps()
            max_batch_size = max_batch_size or caps.sequences
            max_prefill_tokens = max_prefill_tokens or caps.prefill_tokens
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
        self.allocate(max_batch_size, num_blocks, total, snapshots)
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
            max_prefill_tokens=max_prefill_tokens,
        )

    def _caps(self, limit: int, adapter_bytes: int) -> Caps:
        """Returns the caps for this GPU, from the time of a prompt and the free memory; the same for all shards.

        limit: maximum number of tokens of one sequence.
        """
        seconds = []
        for _ in range(2):  # the first compiles kernels
            started = time.perf_counter()
            self._run_largest(DEFAULT_SEQUENCES, min(MEASURED_TOKENS, limit), limit, None)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - started)
        token_seconds = seconds[-1] / min(MEASURED_TOKENS, limit)
        token_bytes = self.bytes_per_token + self.companion_bytes
        free = self._affordable(DEFAULT_SEQUENCES, adapter_bytes=adapter_bytes)[0] * self.block_size * token_bytes
        caps = caps_of_gpu(free, token_bytes, token_seconds)
        if self._group is not None:
            caps = Caps(self._group.minimum(caps.sequences), self._group.minimum(caps.prefill_tokens))
        logger.info(
            "chosen: at most %d sequences in a batch, and %d prompt tokens in a step (a prompt token takes %.1f us; "
            "%d bytes for keys and values, %d for each token)",
            caps.sequences,
            caps.prefill_tokens,
            token_seconds * 1e6,
            free,
            token_bytes,
        )
        return caps

    def _affordable(self, max_batch_size: int, taken: int = 0, adapter_bytes: int = 0) -> tuple[int, int]:
        """Returns how many blocks and snapshots of states fit into memory, the same for all shards.

        States of `max_batch_size` sequences come first. taken, adapter_bytes: bytes to leave out; the latter are still
        free, and for each process.
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
        """Warms up beside another model, for the same sequences and the same block ids.

        Its steps with prompts are not captured, since drafters may have inputs of their own there.
        """
        self._captured = CapturedSteps()
        self._run_largest(capacity.max_batch_size, max_prefill_tokens, capacity.max_total_tokens, None)
        self.allocate(capacity.max_batch_size, capacity.num_blocks, capacity.max_total_tokens)
        self.model.fix_length(capacity.max_total_tokens)
        self._capture()

    def _capture(self, most: int = 0) -> None:
        """Captures steps as CUDA graphs. most: tokens of a step with prompts; 0: none are captured, as it drafts."""
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
        head = self.model.split_head if most else None  # drafters read logits
        steps = StepCapture(self._batch, self.model.forward, capture, self._group, self._uncapturable, head)
        captured = self._captured = CapturedSteps(steps.decoding(sizes), head=head)
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
        self.allocate(max_batch_size, len(blocks), tokens + 1)
        forget_peak(self._device)
        self.model.fix_length(tokens + 1)
        self.run_prompt(tokens, blocks)
        self.truncate(0)
        if sample is not None:
            longest = max(tokens + 1, min(limit, self._affordable(max_batch_size)[0] * self.block_size))
            self.allocate(max_batch_size, len(blocks), longest)
            self.model.fix_length(longest)
            sample(self._run_last_chunk(tokens, longest, blocks, max_batch_size))

    def _run_last_chunk(self, tokens: int, longest: int, blocks: list[int], max_batch_size: int) -> Tensor:
        """Runs the last `tokens` tokens of the longest prompt, while all other rows decode. Returns all rows' logits.

        The prompt's block table repeats the blocks of these tokens, so the cache needs no more memory than for them,
        while intermediate tensors are as large as with the longest prompt.
        """
        repeated = -(-longest // self.block_size)
        table = (blocks * -(-repeated // len(blocks)))[:repeated]
        sequence = RunningSequence(0, [0] * longest, StoppingParameters(1), blocks=table, computed=longest - tokens)
        return self.forward(max_batch_size - 1, [PromptChunk.next_of(sequence, tokens)])
