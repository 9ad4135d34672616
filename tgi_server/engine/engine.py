"""The engine: one model, one running batch, one step at a time."""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgi_server.contract import StateSave
from tgi_server.engine.backends.base import TopOnly
from tgi_server.engine.batch import ForwardPlan, RunningBatch
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.errors import InvalidCall, InvalidImage
from tgi_server.engine.load_parts import load_parts
from tgi_server.engine.lora.loaded import LoadedAdapters
from tgi_server.engine.memory import copy_to_device, to_device
from tgi_server.engine.parallel import share_cores
from tgi_server.engine.prefix_store import PrefixStore
from tgi_server.engine.runners.base import CacheCapacity, PromptChunk
from tgi_server.engine.sampling import (
    PendingTokens,
    SamplerChoice,
    ScoredReport,
    TokenMask,
    Tokens,
    WatermarkSettings,
    most_logits,
    prompt_logprobs,
    scored_logprobs,
)
from tgi_server.engine.sampling.masks import MaskBuilder, PendingMask
from tgi_server.engine.sequence import PromptTokens, RunningSequence
from tgi_server.engine.speculation import Draft, DraftCheck
from tgi_server.engine.step import Step
from tgi_server.engine.vision.images import PromptImages
from tgi_server.grammar import GrammarCompiler, InvalidGrammar, LimitedThoughts

logger = logging.getLogger(__name__)


class Engine:
    """Runs a model on a batch whose sequences join and leave at every step.

    The caller owns the KV blocks: it says which blocks a sequence has, and grants more before they are needed.
    `step` starts a step and returns it; `Step.collect` waits for it. On a GPU the next step can be started before the
    last one has been collected. Not thread-safe.

    adapters: reads adapters, and holds those that sequences may name.
    grammars: compiles grammars, in any thread; None where the model's folder has no tokenizer.
    speculation: plans drafts; None where none are wanted. tower: reads images; None where none are read.
    """

    def __init__(self, config: EngineConfig, model: PreTrainedModel | None = None) -> None:
        """Loads the model. Raises an EngineError that says what is wrong with the folder.

        model: one that is on the device already, in evaluation mode; it is changed, and nothing else may use it after.
        It reads no images, since the weights of a vision tower come from a folder.
        """
        started = time.perf_counter()
        share_cores(config.group.sharing_cores if config.group else 1)
        parts = load_parts(config, model)
        self._device = config.device
        self._group = config.group
        self._runner, self._backend = parts.runner, parts.runner.backend
        self.info, self.tower, self.speculation = parts.info, parts.tower, parts.speculation
        self.adapters = LoadedAdapters(
            parts.model,
            config.model_path,
            parts.config,
            lambda: self._runner.adapt(self._backend.lora(config.max_lora_rank)),
            config.group,
            max_rank=config.max_lora_rank,
            trust_remote_code=config.trust_remote_code,
        )
        self._samplers = SamplerChoice(
            self.info.vocab_size,
            self._device,
            WatermarkSettings(config.watermark_gamma, config.watermark_delta),
            config.group,
            on_cpu=self._backend.samples_on_cpu,
            custom_kernels=config.custom_kernels,
        )
        self._batch: RunningBatch | None = None
        self._capacity: CacheCapacity | None = None
        self.grammars = (
            GrammarCompiler(config.model_path, self.info.vocab_size, self.info.eos_token_ids)
            if self.info.grammars
            else None
        )
        self._masks: MaskBuilder | None = None
        self._steps: deque[Step] = deque()  # whose ended sequences may still be in the batch, in the order of starting
        self._eos = frozenset(self.info.eos_token_ids)
        logger.info(
            "loaded %s in %.1f s; forward pass: %s; weights: %s; linear layers: %s; threads: %d",
            config.model_path,
            time.perf_counter() - started,
            self.info.forward_pass,
            self.info.quantization or self.info.dtype,
            self.info.linear_kernels,
            torch.get_num_threads(),
        )

    @torch.inference_mode()
    def warm_up(
        self,
        max_batch_size: int | None,
        max_prefill_tokens: int | None,
        max_total_tokens: int | None = None,
        max_batch_total_tokens: int | None = None,
        adapter_bytes: int = 0,
    ) -> CacheCapacity:
        """Sizes the cache for at most `max_batch_size` sequences and runs the largest step once.

        max_prefill_tokens: prompt tokens of one step. max_total_tokens: tokens of one sequence. max_batch_total_tokens:
        tokens of all sequences together. None: as many as device, model and memory allow. adapter_bytes: memory kept
        free for adapters that are not loaded yet. Raises NotEnoughMemory.
        """
        self.clear()
        sample = None
        image_bytes = 0
        if self.tower is not None:
            self.tower.clear()
            image_bytes = self.tower.memory
        if self._backend.fixed_memory:  # kernels are compiled at their first use, too
            sample = self._rehearse_sampling
            if adapter_bytes or self.adapters.attached:
                self.adapters.warm_up()
        self._capacity = self._runner.warm_up(
            max_batch_size,
            max_prefill_tokens,
            max_total_tokens,
            max_batch_total_tokens,
            adapter_bytes + image_bytes,
            sample,
        )
        logger.info(
            "KV cache: room for %d tokens in %s", self._capacity.max_batch_total_tokens, self.info.kv_cache_dtype
        )
        self._sampler = self._samplers.create(self._capacity.max_batch_size)
        if self.speculation is not None:
            self.speculation.warm_up(self._runner, self._capacity)
        return self._capacity

    def _rehearse_sampling(self, logits: Tensor) -> None:
        """Samples from logits, [rows, vocab_size], in every way; notes it if the kernel that samples is not used."""
        if (fault := self._samplers.rehearse(logits)) is None:
            return
        fallback = f"sampling runs in plain torch, which is slower: {fault}"
        logger.warning(fallback)
        if fallback not in self._runner.fallbacks:
            self._runner.fallbacks.append(fallback)

    @torch.inference_mode()
    def check_device(self) -> None:
        """Computes something small. Raises RuntimeError for a poisoned device, and for shards that are out of step."""
        if self._group is not None:
            self._group.check()
        assert int(torch.ones(2, device=self._device).sum()) == 2

    @torch.inference_mode()
    def step(
        self,
        batch_id: int,
        joining: Sequence[RunningSequence] = (),
        chunks: Sequence[tuple[int, int]] = (),
        grants: Sequence[tuple[int, list[int]]] = (),
        saves: Sequence[StateSave] = (),
        *,
        decode: bool = True,
        closing: Sequence[int] = (),
    ) -> Step:
        """Starts a step, and returns it without waiting for its tokens.

        joining: sequences that join the batch. chunks: prompts to compute, (request id, tokens). grants: KV blocks for
        sequences that grow, (request id, blocks). saves: states to copy into snapshots, of sequences that were in the
        batch before. decode: every sequence past its prompt advances by a token.
        closing: requests whose grammars end their texts with few tokens from now on.

        Raises InvalidCall, and whatever the device raises. After an error the batch is gone.
        """
        batch = self._batch_for(batch_id)
        try:
            self._settle(batch)
            for sequence in joining:
                self._constrain(sequence)
                sequence.adapter = self.adapters.number(sequence.adapter_id)
                self._place_images(sequence)
                batch.join(sequence)
            for request_id, blocks in grants:
                batch.grant(request_id, blocks)
            for request_id in closing:
                batch.close(request_id)
            for save in saves:
                batch.save_state(save)
            prompts = [self._chunk(batch, request_id, tokens, saves) for request_id, tokens in chunks]
            if decode:
                prompts += [PromptChunk.next_of(sequence, sequence.remaining) for sequence in batch.jumping()]
            plan = batch.plan(prompts, decode=decode)
            step = self._start(batch, plan, self._drafts(plan))
        except BaseException:
            self.clear()
            raise
        self._steps.append(step)
        return step

    @torch.inference_mode()
    def keep(self, batch_id: int, request_ids: Sequence[int]) -> None:
        """Forgets all of a batch's sequences but these."""
        batch = self._batch_for(batch_id)
        self._settle(batch)
        batch.keep(request_ids)

    @torch.inference_mode()
    def clear(self, batch_id: int | None = None) -> None:
        """Forgets a batch; None: whichever is running. The contents of the KV blocks stay."""
        if self._batch is not None and batch_id in (None, self._batch.id):
            self._batch.keep(())
            self._batch = None
            self._steps.clear()

    @property
    def capacity(self) -> CacheCapacity:
        """The capacity that the last warm-up found. Raises InvalidCall before the first one."""
        if self._capacity is None:
            raise InvalidCall("warm up before the first step")
        return self._capacity

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The reasons why parts of the model are computed in a slower way than the device has."""
        return tuple(self._runner.fallbacks)

    def prefix_store(self) -> PrefixStore:
        """Returns a store of KV blocks and snapshots, valid until the next warm-up. Raises InvalidCall."""
        return PrefixStore(self._runner, self.info)

    @property
    def batch(self) -> RunningBatch | None:
        """The running batch; None when no sequence is left."""
        return self._batch if self._batch else None

    def _batch_for(self, batch_id: int) -> RunningBatch:
        if self._batch and self._batch.id != batch_id:
            raise InvalidCall(f"batch {self._batch.id} is running; clear it before batch {batch_id}")
        if not self._batch:
            max_batch_size = self.capacity.max_batch_size
            cheap = self._backend.cheap_tokens
            self._batch = RunningBatch(batch_id, self._runner, self._sampler, max_batch_size, cheap)
        return self._batch

    def _chunk(self, batch: RunningBatch, request_id: int, tokens: int, saves: Sequence[StateSave]) -> PromptChunk:
        if request_id not in batch.prefilling:
            raise InvalidCall(f"request {request_id} has no prompt left to compute")
        sequence = batch.prefilling[request_id]
        all_logits = sequence.report.prefill_logprobs and not self.info.encoder_decoder
        own = [save for save in saves if save.request_id == request_id]
        return PromptChunk.next_of(sequence, tokens, all_logits=all_logits, saves=own)

    def _constrain(self, sequence: RunningSequence) -> None:
        if sequence.grammar is None and sequence.thought_budget is None:
            return
        if self.grammars is None:
            raise InvalidCall("grammars and reasoning budgets need a tokenizer in the model's folder")
        generated, stopping = sequence.generated_ids, sequence.stopping
        grammar = None
        if sequence.grammar is not None:
            grammar = self.grammars.constraint(
                sequence.grammar, generated, stopping.max_new_tokens, ignore_eos=stopping.ignore_eos
            )
        sequence.constraint = grammar
        if sequence.thought_budget is not None:
            try:
                spelling = self.grammars.tokenizer.spelling
            except InvalidGrammar as error:
                sequence.fault = str(error)
                return
            sequence.constraint = LimitedThoughts(
                sequence.thought_budget, spelling, grammar, self._eos, generated, ignore_eos=stopping.ignore_eos
            )
        if sequence.closing and sequence.constraint is not None:
            sequence.constraint.close()

    def _place_images(self, sequence: RunningSequence) -> None:
        """Finds the tokens of a sequence's images. A sequence whose images do not fit its prompt notes that."""
        if not sequence.images:
            return
        if self.tower is None:
            sequence.fault = self.info.no_images or "the model reads no images"
            return
        try:
            sequence.placed = PromptImages(self.tower, sequence.input_ids, sequence.images)
        except InvalidImage as fault:
            sequence.fault = str(fault)

    def _settle(self, batch: RunningBatch) -> None:
        """Waits for the tokens of all steps if drafts depend on them, or the next mask of a sequence with a grammar.

        The steps' ended sequences leave here even if the tokens were known before: every shard of a group has the same
        batch at this call.
        """
        if self.speculation is not None or any(sequence.constraint is not None for sequence in batch.rows):
            for step in self._steps:
                step.resolve()
                step.retire()
        self._steps = deque(step for step in self._steps if not step.retired)

    def _drafts(self, plan: ForwardPlan) -> list[Draft]:
        if self.speculation is None:
            return []
        rows = plan.decoding + sum(len(chunk.tokens) for chunk in plan.chunks)
        with self._in_step():
            return self.speculation.plan(plan.sequences, rows, self._runner.block_size)

    def _start(self, batch: RunningBatch, plan: ForwardPlan, drafts: list[Draft]) -> Step:
        started = time.perf_counter_ns()
        mask = self._start_mask(plan.sequences)
        logits = self._forward(plan, drafts, mask) if plan.decoding or plan.chunks else None
        forwarded = time.perf_counter_ns()
        if self.speculation is not None and logits is not None:
            self.speculation.follow(plan.sequences[: plan.decoding], plan.chunks, drafts)
        check = None
        if drafts:
            assert logits is not None
            own = plan.logits
            check = DraftCheck(
                drafts, logits[own:], partial(self._choose, batch), self._greedy_tokens(drafts, logits[own:])
            )
            logits = logits[:own]
        if plan.chunks:
            assert logits is not None
            self._finish_chunks(batch, plan, logits)
        pending = None
        if plan.sequences:
            assert logits is not None
            pending = self._sample(logits, plan, mask.wait() if mask else None)
        return Step(batch, plan.sequences, pending, self._eos, forwarded - started, started, check)

    def _forward(self, plan: ForwardPlan, drafts: list[Draft], mask: PendingMask | None) -> Tensor:
        needed = [plan.top_logits, *(draft.top_logits for draft in drafts)]
        count = most_logits([*needed, self._sampler.top_logits] if plan.decoding else needed)
        top = None if count is None else TopOnly(count, mask)
        chunks = [*plan.chunks, *(draft.chunk for draft in drafts)]
        with self._in_step():
            if drafts and not plan.chunks:
                rows = {sequence: row for row, sequence in enumerate(plan.sequences)}
                drafted = [(rows[chunk.sequence], chunk.tokens) for chunk in chunks]
                if (logits := self._runner.forward_drafts(plan.decoding, drafted)) is not None:
                    return logits
            return self._runner.forward(plan.decoding, chunks, top)

    def _in_step(self) -> AbstractContextManager[None]:
        """Lets the other shards know when this one fails where all of them compute together."""
        return nullcontext() if self._group is None else self._group.step()

    def _start_mask(self, sequences: Sequence[RunningSequence]) -> PendingMask | None:
        """Starts the masks of the sequences with a grammar. Computed while the model runs, where there are cores."""
        constraints = {
            i: sequence.constraint
            for i, sequence in enumerate(sequences)
            if sequence.constraint and not sequence.constraint.free
        }
        if not constraints:
            return None
        assert self.grammars is not None
        self._masks = self._masks or MaskBuilder(self._device, self._backend.spare_cores)
        return self._masks.start(
            list(constraints.values()), list(constraints), self.grammars.tokenizer.lookup.vocab_size
        )

    def _finish_chunks(self, batch: RunningBatch, plan: ForwardPlan, logits: Tensor) -> None:
        """Reports prompts' log-probabilities where requested, and gives rows to sequences whose prompt is complete."""
        start = plan.decoding
        for chunk in plan.chunks:
            end = start + chunk.logits
            if chunk.all_logits:
                _report_prompt(chunk, logits[start:end])
            elif chunk.sequence.report.prefill_logprobs:
                self._report_start(chunk.sequence)
            if chunk.completes:
                batch.promote(chunk.sequence)
            start = end

    def _report_start(self, sequence: RunningSequence) -> None:
        """Reports the token that the decoder starts with: a prompt that an encoder reads has no log-probabilities."""
        assert self.info.decoder_start_token_id is not None
        sequence.prompt_report = PromptTokens([self.info.decoder_start_token_id], [math.nan])

    def _greedy_tokens(self, drafts: Sequence[Draft], logits: Tensor) -> PendingTokens | None:
        """Chooses the tokens after all drafted ones at once; None if this needs more than their logits."""
        if not all(draft.is_greedy for draft in drafts):
            return None
        reported = [draft.sequence.report.logprobs for draft in drafts for _ in draft.tokens]
        rows = [row for row, wanted in enumerate(reported) if wanted]
        return self._sampler.greedy(logits, rows).start_copy()

    def _choose(self, batch: RunningBatch, logits: Tensor, sequences: Sequence[RunningSequence]) -> Tokens:
        """Chooses another token for some sequences, whose last one had been drafted, and waits for it."""
        mask = self._start_mask(sequences)
        rows = [batch.row_of(sequence) for sequence in sequences]
        sampled = self._sampler.sample(logits, rows, mask.wait() if mask else None)
        self._sampler.accept(sampled.token_ids, rows)
        return sampled.start_copy().wait()

    def _sample(self, logits: Tensor, plan: ForwardPlan, mask: TokenMask | None) -> PendingTokens:
        if len(plan.picked) != len(logits):
            logits = logits.index_select(0, to_device(plan.picked, torch.int64, self._device))
        rows = range(plan.first_row, plan.first_row + len(plan.sequences))
        scored = [  # before the sampler changes the logits
            ScoredReport(row, ids, scored_logprobs(logits[row], ids))
            for row, sequence in enumerate(plan.sequences)
            if (ids := sequence.report.scored_token_ids)
        ]
        sampled = self._sampler.sample(logits, rows, mask, self._runner.argmax_ids)
        sampled.scored = scored
        self._sampler.accept(sampled.token_ids, rows)
        self._runner.accept(plan.first_row, sampled.token_ids)
        return sampled.start_copy()


def _report_prompt(chunk: PromptChunk, logits: Tensor) -> None:
    sequence = chunk.sequence
    following = sequence.known[chunk.start + 1 : chunk.start + 1 + len(chunk.tokens)]
    most = sequence.report.prefill_top_n
    if sequence.prompt_report is None:
        sequence.prompt_report = PromptTokens(sequence.input_ids, [math.nan], [[]] if most else [])
    if len(following):
        logprobs, top = prompt_logprobs(logits[: len(following)], copy_to_device(following, logits.device), most)
        sequence.prompt_report.logprobs.extend(logprobs.tolist())
        sequence.prompt_report.top.extend(top)
