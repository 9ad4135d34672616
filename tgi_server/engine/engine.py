"""The engine: one model, one running batch, one step at a time."""

import logging
import math
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig

from tgi_server.engine.batch import Batch
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.models import create_runner
from tgi_server.engine.models.limits import position_limit
from tgi_server.engine.models.runner import Capacity, PromptChunk
from tgi_server.engine.results import FinishReason, Generation, PromptTokens, StepResult, TopTokens
from tgi_server.engine.sampling import PendingTokens, Sampler, Tokens, WatermarkSettings, prompt_logprobs
from tgi_server.engine.sequence import Sequence
from tgi_server.engine.weights import load_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was loaded. max_position_embeddings: None when nothing but memory bounds a sequence."""

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


class Engine:
    """Runs a model on a batch whose sequences join and leave at every step.

    The caller owns the KV blocks: it says which blocks a sequence has, and grants more before they are needed.
    `prefill` and `decode` start a step and return it; `Step.collect` waits for it. On a GPU the next step can be
    started before the last one has been collected. Not thread-safe.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Loads the model. Raises an EngineError that says what is wrong with the folder."""
        started = time.perf_counter()
        device = config.resolve_device()
        model = load_model(config, device)
        self._device = device
        self._runner = create_runner(model, config)
        self._watermark = WatermarkSettings(config.watermark_gamma, config.watermark_delta)
        self._batch: Batch | None = None
        self._capacity: Capacity | None = None
        self._max_batch_size = 0
        self.info = ModelInfo(
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
        )
        self._eos = frozenset(self.info.eos_token_ids)
        logger.info("loaded %s in %.1f s", config.model_path, time.perf_counter() - started)

    @torch.inference_mode()
    def warm_up(self, max_batch_size: int, max_prefill_tokens: int, max_total_tokens: int | None = None) -> Capacity:
        """Sizes the cache for at most `max_batch_size` sequences and runs the largest step once.

        max_prefill_tokens: prompt tokens of one step. max_total_tokens: of one sequence; None: as many as the model
        and the memory allow. Raises NotEnoughMemory.
        """
        self.clear()
        self._capacity = self._runner.warm_up(max_batch_size, max_prefill_tokens, max_total_tokens)
        self._max_batch_size = max_batch_size
        self._sampler = Sampler(max_batch_size, self.info.vocab_size, self._device, self._watermark)
        return self._capacity

    @torch.inference_mode()
    def check_device(self) -> None:
        """Computes something small; raises whatever a poisoned device raises."""
        assert int(torch.ones(2, device=self._device).sum()) == 2

    @torch.inference_mode()
    def prefill(
        self,
        batch_id: int,
        joining: SequenceOf[Sequence],
        chunks: SequenceOf[tuple[int, int]],
        grants: SequenceOf[tuple[int, list[int]]] = (),
        decode: bool = True,
    ) -> "Step":
        """Sequences join, prompt chunks, (request id, tokens), are computed, and running sequences may decode along.

        Raises InvalidCall, and whatever the device raises. After an error the batch is gone.
        """
        batch = self._batch_for(batch_id)
        try:
            for sequence in joining:
                batch.join(sequence)
            self._grant(batch, grants)
            spans = [self._chunk(batch, request_id, tokens) for request_id, tokens in chunks]
            return self._start(batch, len(batch.rows) if decode else 0, spans)
        except BaseException:
            self.clear()
            raise

    @torch.inference_mode()
    def decode(self, batch_id: int, grants: SequenceOf[tuple[int, list[int]]] = ()) -> "Step":
        """Every sequence past its prompt advances by one token. Errors as in `prefill`."""
        batch = self._batch_for(batch_id)
        try:
            self._grant(batch, grants)
            return self._start(batch, len(batch.rows), [])
        except BaseException:
            self.clear()
            raise

    @torch.inference_mode()
    def keep(self, batch_id: int, request_ids: SequenceOf[int]) -> None:
        """Forgets all of a batch's sequences but these."""
        self._batch_for(batch_id).keep(request_ids)

    @torch.inference_mode()
    def clear(self, batch_id: int | None = None) -> None:
        """Forgets a batch, or whatever batch there is. What is in the KV blocks stays."""
        if self._batch is not None and batch_id in (None, self._batch.id):
            self._batch.keep(())
            self._batch = None

    @property
    def batch(self) -> Batch | None:
        """The running batch; None when no sequence is left."""
        return self._batch if self._batch else None

    def _batch_for(self, batch_id: int) -> Batch:
        if self._capacity is None:
            raise InvalidCall("warm up before the first step")
        if self._batch and self._batch.id != batch_id:
            raise InvalidCall(f"batch {self._batch.id} is running; clear it before batch {batch_id}")
        if not self._batch:
            self._batch = Batch(batch_id, self._runner, self._sampler, self._max_batch_size)
        return self._batch

    @staticmethod
    def _grant(batch: Batch, grants: SequenceOf[tuple[int, list[int]]]) -> None:
        for request_id, blocks in grants:
            batch.grant(request_id, blocks)

    def _chunk(self, batch: Batch, request_id: int, tokens: int) -> PromptChunk:
        if request_id not in batch.prefilling:
            raise InvalidCall(f"request {request_id} has no prompt left to compute")
        sequence = batch.prefilling[request_id]
        start = sequence.computed
        all_logits = sequence.report.prefill_logprobs and not self.info.encoder_decoder
        return PromptChunk(sequence, sequence.next_chunk(tokens), start, all_logits)

    def _start(self, batch: Batch, decoding: int, chunks: list[PromptChunk]) -> "Step":
        started = time.perf_counter_ns()
        first = 0 if decoding else len(batch.rows)
        if decoding or chunks:
            logits = self._runner.forward(decoding, chunks)
        forwarded = time.perf_counter_ns()
        picked = self._finish_chunks(batch, decoding, chunks, logits) if chunks else list(range(decoding))
        sequences = batch.rows[first:]
        pending = None
        if sequences:
            if len(picked) != len(logits):
                logits = logits[torch.tensor(picked, device=self._device)]
            pending = self._sample(logits, first, len(sequences))
        return Step(self, batch, sequences, pending, forwarded - started, started)

    def _finish_chunks(self, batch: Batch, decoding: int, chunks: list[PromptChunk], logits: Tensor) -> list[int]:
        """Sequences whose prompt is complete take their rows. Returns the indices of the logits to sample from."""
        picked, start = list(range(decoding)), decoding
        for chunk in chunks:
            end = start + chunk.logits
            if chunk.all_logits:
                _report_prompt(chunk, logits[start:end])
            elif chunk.sequence.report.prefill_logprobs:
                self._report_start(chunk.sequence)
            if chunk.completes:
                batch.promote(chunk.sequence)
                picked.append(end - 1)
            start = end
        return picked

    def _report_start(self, sequence: Sequence) -> None:
        """What an encoder reads has no likelihood; a decoder's own prompt is the token that it starts with."""
        assert self.info.decoder_start_token_id is not None
        sequence.prompt_report = PromptTokens([self.info.decoder_start_token_id], [math.nan])

    def _sample(self, logits: Tensor, first: int, count: int) -> PendingTokens:
        rows = range(first, first + count)
        sampled = self._sampler.sample(logits, rows)
        self._sampler.accept(sampled.token_ids, rows)
        self._runner.accept(first, sampled.token_ids)
        return sampled.start_copy()

    def _end(self, batch: Batch, generations: list[Generation], sequences: list[Sequence]) -> None:
        ended = []
        for generation, sequence in zip(generations, sequences, strict=True):
            sequence.generated += 1
            if generation.token_id in self._eos and not sequence.stopping.ignore_eos:
                generation.finish_reason = FinishReason.EOS_TOKEN
            elif sequence.generated >= sequence.stopping.max_new_tokens:
                generation.finish_reason = FinishReason.LENGTH
            else:
                continue
            ended.append(sequence.request_id)
        if ended:
            batch.drop(ended)


class Step:
    """A step that has been started."""

    def __init__(
        self,
        engine: Engine,
        batch: Batch,
        sequences: list[Sequence],
        pending: PendingTokens | None,
        forward_ns: int,
        started_ns: int,
    ) -> None:
        self._engine = engine
        self._batch = batch
        self._sequences = sequences
        self._pending = pending
        self._forward_ns = forward_ns
        self._started_ns = started_ns

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Waits for the step's tokens, and lets the sequences that end with them leave the batch.

        Sequences that left after the step was started get nothing from it. Call it once, in the order of starting.
        """
        generations: list[Generation] = []
        if self._pending is not None:
            rows = _generations(self._pending.wait(), self._sequences)
            alive = [
                (row, sequence)
                for row, sequence in zip(rows, self._sequences, strict=True)
                if sequence.request_id in self._batch
            ]
            generations = [row for row, _ in alive]
            self._engine._end(self._batch, generations, [sequence for _, sequence in alive])
        return StepResult(generations, self._forward_ns, time.perf_counter_ns() - self._started_ns)


def _generations(tokens: Tokens, sequences: list[Sequence]) -> list[Generation]:
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


def _report_prompt(chunk: PromptChunk, logits: Tensor) -> None:
    sequence = chunk.sequence
    following = sequence.known[chunk.start + 1 : chunk.start + 1 + len(chunk.tokens)]
    if sequence.prompt_report is None:
        sequence.prompt_report = PromptTokens(sequence.input_ids, [math.nan])
    if len(following):
        logprobs = prompt_logprobs(logits[: len(following)], following.to(logits.device))
        sequence.prompt_report.logprobs.extend(logprobs.tolist())


def _eos_token_ids(config: GenerationConfig) -> tuple[int, ...]:
    eos = config.eos_token_id
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
