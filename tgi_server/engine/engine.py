"""The engine: one model, one running batch, one step at a time."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from tgi_server.engine.attention.base import GreedyOnly
from tgi_server.engine.batch import RunningBatch
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.errors import EngineError, InvalidCall
from tgi_server.engine.grammar import GrammarCompiler, InvalidGrammar
from tgi_server.engine.grammar.masks import MaskBuilder, PendingMask
from tgi_server.engine.grammar.tokenizer import has_tokenizer
from tgi_server.engine.memory import copy_to_device, to_device
from tgi_server.engine.runners import create_runner
from tgi_server.engine.runners.base import CacheCapacity, PromptChunk, position_limit
from tgi_server.engine.sampling import (
    PendingTokens,
    Sampler,
    TokenMask,
    WatermarkSettings,
    is_plain,
    prompt_logprobs,
)
from tgi_server.engine.sequence import PromptTokens, RunningSequence
from tgi_server.engine.step import Step
from tgi_server.engine.weights import load_model

logger = logging.getLogger(__name__)

# Tokens that a step computes in the time that it waits for the weights.
_CHEAP_TOKENS = {"cuda": 128, "cpu": 4}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What was loaded. max_position_embeddings: None when nothing but memory bounds a sequence.

    grammars: whether sequences may have one.
    """

    model_type: str
    dtype: str
    device_type: str
    vocab_size: int
    max_position_embeddings: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    decoder_start_token_id: int | None
    encoder_decoder: bool
    paged: bool
    block_size: int
    grammars: bool


class Engine:
    """Runs a model on a batch whose sequences join and leave at every step.

    The caller owns the KV blocks: it says which blocks a sequence has, and grants more before they are needed.
    `step` starts a step and returns it; `Step.collect` waits for it. On a GPU the next step can be started before the
    last one has been collected. Not thread-safe.

    grammars: compiles grammars, in any thread; None where the model's folder has no tokenizer.
    """

    def __init__(self, config: EngineConfig, model: PreTrainedModel | None = None) -> None:
        """Loads the model. Raises an EngineError that says what is wrong with the folder.

        model: one that is on the device already, in evaluation mode; it is changed, and nothing else may use it after.
        """
        started = time.perf_counter()
        device = config.resolve_device()
        model = model or load_model(config, device)
        self._device = device
        self._group = config.group
        self._runner = create_runner(model, config)
        self._watermark = WatermarkSettings(config.watermark_gamma, config.watermark_delta)
        self._batch: RunningBatch | None = None
        self._capacity: CacheCapacity | None = None
        self._max_batch_size = 0
        self.info = LoadedModel(
            model_type=model.config.model_type,
            dtype=str(model.dtype).removeprefix("torch."),
            device_type=device.type,
            vocab_size=model.config.get_text_config(decoder=True).vocab_size,
            max_position_embeddings=position_limit(model.config),
            eos_token_ids=_eos_token_ids(model.generation_config),
            bos_token_id=model.generation_config.bos_token_id,
            decoder_start_token_id=model.generation_config.decoder_start_token_id,
            encoder_decoder=model.config.is_encoder_decoder,
            paged=self._runner.paged,
            block_size=self._runner.block_size,
            grammars=has_tokenizer(config.model_path),
        )
        self.grammars = self._grammar_compiler(config) if self.info.grammars else None
        self._masks: MaskBuilder | None = None
        self._last: Step | None = None
        self._eos = frozenset(self.info.eos_token_ids)
        logger.info("loaded %s in %.1f s", config.model_path, time.perf_counter() - started)

    @torch.inference_mode()
    def warm_up(
        self, max_batch_size: int, max_prefill_tokens: int, max_total_tokens: int | None = None
    ) -> CacheCapacity:
        """Sizes the cache for at most `max_batch_size` sequences and runs the largest step once.

        max_prefill_tokens: prompt tokens of one step. max_total_tokens: of one sequence; None: as many as the model
        and the memory allow. Raises NotEnoughMemory.
        """
        self.clear()
        self._capacity = self._runner.warm_up(max_batch_size, max_prefill_tokens, max_total_tokens)
        self._max_batch_size = max_batch_size
        self._sampler = Sampler(max_batch_size, self.info.vocab_size, self._device, self._watermark)
        return self._capacity

    def reserve(self, seconds: float) -> bool:
        """For when there is nothing else to do: takes memory that may soon be needed. Whether more could be taken."""
        return self._capacity is not None and self._runner.reserve(seconds)

    @torch.inference_mode()
    def check_device(self) -> None:
        """Computes something small; raises whatever a poisoned device raises, or shards that are out of step."""
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
        *,
        decode: bool = True,
    ) -> Step:
        """Starts a step, and returns it without waiting for its tokens.

        joining: sequences that join the batch. chunks: prompts to compute, (request id, tokens). grants: KV blocks for
        sequences that grow, (request id, blocks). decode: every sequence past its prompt advances by a token.

        Raises InvalidCall, and whatever the device raises. After an error the batch is gone.
        """
        batch = self._batch_for(batch_id)
        try:
            self._settle(batch)
            for sequence in joining:
                self._constrain(sequence)
                batch.join(sequence)
            for request_id, blocks in grants:
                batch.grant(request_id, blocks)
            prompts = [self._chunk(batch, request_id, tokens) for request_id, tokens in chunks]
            if decode:
                prompts += [PromptChunk.next_of(sequence, sequence.remaining) for sequence in batch.jumping()]
            self._last = self._start(batch, _Pass.of(batch, prompts, decode=decode))
        except BaseException:
            self.clear()
            raise
        return self._last

    @torch.inference_mode()
    def keep(self, batch_id: int, request_ids: Sequence[int]) -> None:
        """Forgets all of a batch's sequences but these."""
        self._batch_for(batch_id).keep(request_ids)

    @torch.inference_mode()
    def clear(self, batch_id: int | None = None) -> None:
        """Forgets a batch, or whatever batch there is. What is in the KV blocks stays."""
        if self._batch is not None and batch_id in (None, self._batch.id):
            self._batch.keep(())
            self._batch = None

    @property
    def batch(self) -> RunningBatch | None:
        """The running batch; None when no sequence is left."""
        return self._batch if self._batch else None

    def _batch_for(self, batch_id: int) -> RunningBatch:
        if self._capacity is None:
            raise InvalidCall("warm up before the first step")
        if self._batch and self._batch.id != batch_id:
            raise InvalidCall(f"batch {self._batch.id} is running; clear it before batch {batch_id}")
        if not self._batch:
            cheap = _CHEAP_TOKENS.get(self._device.type, 1)
            self._batch = RunningBatch(batch_id, self._runner, self._sampler, self._max_batch_size, cheap)
        return self._batch

    def _chunk(self, batch: RunningBatch, request_id: int, tokens: int) -> PromptChunk:
        if request_id not in batch.prefilling:
            raise InvalidCall(f"request {request_id} has no prompt left to compute")
        sequence = batch.prefilling[request_id]
        all_logits = sequence.report.prefill_logprobs and not self.info.encoder_decoder
        return PromptChunk.next_of(sequence, tokens, all_logits=all_logits)

    def _grammar_compiler(self, config: EngineConfig) -> GrammarCompiler:
        return GrammarCompiler(config.model_path, self.info.vocab_size, self.info.eos_token_ids)

    def _constrain(self, sequence: RunningSequence) -> None:
        if sequence.grammar is None:
            return
        if self.grammars is None:
            raise InvalidCall("grammars need a tokenizer in the model's folder, and there is none")
        stopping = sequence.stopping
        try:
            sequence.constraint = self.grammars.constraint(
                sequence.grammar, sequence.generated_ids, stopping.max_new_tokens, ignore_eos=stopping.ignore_eos
            )
        except InvalidGrammar as error:
            raise InvalidCall(f"the grammar of request {sequence.request_id} cannot be used: {error}") from error

    def _settle(self, batch: RunningBatch) -> None:
        """What a grammar allows next depends on the last token, so the host has to know it before the next step."""
        if self._last is not None and any(sequence.constraint is not None for sequence in batch.rows):
            self._last.resolve()

    def _start(self, batch: RunningBatch, step: "_Pass") -> Step:
        started = time.perf_counter_ns()
        mask = self._start_mask(step.sequences)
        logits = self._forward(step, mask) if step.decoding or step.chunks else None
        forwarded = time.perf_counter_ns()
        if step.chunks:
            assert logits is not None
            self._finish_chunks(batch, step, logits)
        pending = None
        if step.sequences:
            assert logits is not None
            pending = self._sample(logits, step, mask.wait() if mask else None)
        return Step(batch, step.sequences, pending, self._eos, forwarded - started, started)

    def _forward(self, step: "_Pass", mask: PendingMask | None) -> Tensor:
        greedy = GreedyOnly(mask) if step.is_greedy and not (step.decoding and self._sampler.processes) else None
        if self._group is None:
            return self._runner.forward(step.decoding, step.chunks, greedy)
        self._group.check()
        try:
            return self._runner.forward(step.decoding, step.chunks, greedy)
        except EngineError:
            raise
        except BaseException as error:
            self._group.abandon(f"{type(error).__name__} in shard {self._group.rank}")
            raise

    def _start_mask(self, sequences: Sequence[RunningSequence]) -> PendingMask | None:
        """Starts the masks of the sequences with a grammar. Computed while the model runs, where there are cores."""
        constraints = {i: each.constraint for i, each in enumerate(sequences) if each.constraint is not None}
        if not constraints:
            return None
        assert self.grammars is not None
        self._masks = self._masks or MaskBuilder(self._device)
        return self._masks.start(
            list(constraints.values()), list(constraints), self.grammars.tokenizer.lookup.vocab_size
        )

    def _finish_chunks(self, batch: RunningBatch, step: "_Pass", logits: Tensor) -> None:
        """Reports what was asked about prompts, and gives rows to the sequences whose prompt is complete."""
        start = step.decoding
        for chunk in step.chunks:
            end = start + chunk.logits
            if chunk.all_logits:
                _report_prompt(chunk, logits[start:end])
            elif chunk.sequence.report.prefill_logprobs:
                self._report_start(chunk.sequence)
            if chunk.completes:
                batch.promote(chunk.sequence)
            start = end

    def _report_start(self, sequence: RunningSequence) -> None:
        """What an encoder reads has no likelihood; a decoder's own prompt is the token that it starts with."""
        assert self.info.decoder_start_token_id is not None
        sequence.prompt_report = PromptTokens([self.info.decoder_start_token_id], [math.nan])

    def _sample(self, logits: Tensor, step: "_Pass", mask: TokenMask | None) -> PendingTokens:
        if len(step.picked) != len(logits):
            logits = logits.index_select(0, to_device(step.picked, torch.int64, self._device))
        rows = range(step.first_row, step.first_row + len(step.sequences))
        sampled = self._sampler.sample(logits, rows, mask)
        self._sampler.accept(sampled.token_ids, rows)
        self._runner.accept(step.first_row, sampled.token_ids)
        return sampled.start_copy()


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass, and the sequences that get a token from it.

    decoding: the first so many rows decode. chunks: what is computed beside them. sequences: those that get a token, in
    the order of the rows that they have, or take once their prompt is complete. first_row: of the first of them.
    picked: the indices of their logits among those that the pass yields.
    """

    decoding: int
    chunks: list[PromptChunk]
    sequences: list[RunningSequence]
    first_row: int
    picked: list[int]

    @classmethod
    def of(cls, batch: RunningBatch, chunks: list[PromptChunk], *, decode: bool) -> "_Pass":
        decoding = len(batch.rows) if decode else 0
        sequences = batch.rows[:decoding]
        picked, end = list(range(decoding)), decoding
        for chunk in chunks:
            end += chunk.logits
            if chunk.completes:
                sequences.append(chunk.sequence)
                picked.append(end - 1)
        return cls(decoding, chunks, sequences, 0 if decode else len(batch.rows), picked)

    @property
    def is_greedy(self) -> bool:
        """Returns True if no chunk needs more logits than the largest of its sequence's last token."""
        return all(
            is_plain(chunk.sequence.sampling, chunk.sequence.report) and not chunk.all_logits for chunk in self.chunks
        )


def _report_prompt(chunk: PromptChunk, logits: Tensor) -> None:
    sequence = chunk.sequence
    following = sequence.known[chunk.start + 1 : chunk.start + 1 + len(chunk.tokens)]
    if sequence.prompt_report is None:
        sequence.prompt_report = PromptTokens(sequence.input_ids, [math.nan])
    if len(following):
        logprobs = prompt_logprobs(logits[: len(following)], copy_to_device(following, logits.device))
        sequence.prompt_report.logprobs.extend(logprobs.tolist())


def _eos_token_ids(config: GenerationConfig) -> tuple[int, ...]:
    eos = config.eos_token_id
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
