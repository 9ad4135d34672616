"""Forward passes over padded batches, by a decoder alone or by a decoder that attends to an encoder's states."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from tgi_server.engine.backends.generic import CurrentRows
from tgi_server.engine.backends.lora import AdapterRows
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.runners.padded.batch import Encoded, PaddedBatch, joinable_cache
from tgi_server.engine.sequence import RunningSequence


class Passes(ABC):
    """Runs one model. current_adapters: the adapters of the pass that runs."""

    def __init__(self, model: PreTrainedModel, current_adapters: CurrentRows | None = None) -> None:
        self._model = model
        self._current_adapters = current_adapters or CurrentRows()
        self._device = model.device
        self._accepted = inspect.signature(model.forward).parameters

    @abstractmethod
    def prefill(
        self, sequences: Sequence[RunningSequence], *, all_logits: bool, joinable: bool
    ) -> tuple[PaddedBatch, Tensor]:
        """Computes all known tokens of some sequences, which become the rows of a batch.

        joinable: True if that batch will be joined with others, or lose rows.
        Returns it with logits, [rows, tokens, vocab_size]: of every token when `all_logits`, else at least of each
        row's last one; the last token of every row is the last there.
        """

    @abstractmethod
    def decode(self, batch: PaddedBatch, tokens: Tensor) -> Tensor:
        """Advances every row by its token. tokens: [rows] int64. Returns logits, [rows, vocab_size]."""

    @abstractmethod
    def alone(self, sequence: RunningSequence) -> Tensor:
        """Computes a whole text in one pass, without a cache.

        Returns logits, [1 + generated, vocab_size]: after its prompt, and after each token generated so far.
        """

    def _padded(self, texts: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
        """Returns token ids, the padding being 0, and their mask: [rows, longest] int64 each."""
        longest = max(map(len, texts))
        tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, text in enumerate(texts):
            span = slice(longest - len(text), None) if left else slice(len(text))
            tokens[row, span] = torch.tensor(text)
            mask[row, span] = 1
        return tokens.to(self._device), mask.to(self._device)

    def _adapt(self, numbers: Sequence[int]) -> None:
        """Sets the adapters of the next passes. numbers: the adapter of each row; 0: none."""
        self._current_adapters.rows = AdapterRows.of_sequences(numbers, self._device)

    def _only_last(self, all_logits: bool = False) -> dict[str, int]:
        return {"logits_to_keep": 1} if "logits_to_keep" in self._accepted and not all_logits else {}


class CausalPasses(Passes):
    """Passes of a decoder: the prompt and the generated tokens are one text."""

    def prefill(
        self, sequences: Sequence[RunningSequence], *, all_logits: bool, joinable: bool
    ) -> tuple[PaddedBatch, Tensor]:
        adapters = [sequence.adapter for sequence in sequences]
        self._adapt(adapters)
        texts = [sequence.known.tolist() for sequence in sequences]
        tokens, mask = self._padded(texts, left=True)
        config = self._model.config
        cache = joinable_cache(config) if joinable else DynamicCache(config=config)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = self._run(tokens, mask, positions, cache, all_logits)
        return PaddedBatch(cache, [len(text) for text in texts], mask, adapters=adapters), logits

    def decode(self, batch: PaddedBatch, tokens: Tensor) -> Tensor:
        self._adapt(batch.adapters)
        positions = batch.positions
        batch.grow()
        mask = batch.mask if batch.has_keys else None
        return self._run(tokens[:, None], mask, positions[:, None], batch.cache, False)[:, -1]

    def alone(self, sequence: RunningSequence) -> Tensor:
        tokens, mask = self._padded([sequence.known.tolist()], left=True)
        logits = self._model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        return logits[0, len(sequence.input_ids) - 1 :]

    def _run(self, tokens: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache, all_logits: bool) -> Tensor:
        options = {"position_ids": positions} if "position_ids" in self._accepted else {}
        options |= {"cache_params" if "cache_params" in self._accepted else "past_key_values": cache}
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            use_cache=True,
            **options,
            **self._only_last(all_logits),
        )
        return output.logits


class Seq2SeqPasses(Passes):
    """Passes of an encoder that reads the prompt once, and of a decoder whose text begins with a token of its own."""

    def __init__(self, model: PreTrainedModel, current_adapters: CurrentRows | None = None) -> None:
        super().__init__(model, current_adapters)
        start = model.generation_config.decoder_start_token_id
        if start is None:
            raise UnsupportedModel(f"this {model.config.model_type} model has no decoder_start_token_id")
        self._start = int(start)

    def prefill(
        self, sequences: Sequence[RunningSequence], *, all_logits: bool, joinable: bool
    ) -> tuple[PaddedBatch, Tensor]:
        adapters = [sequence.adapter for sequence in sequences]
        self._adapt(adapters)
        encoded = self._encode([sequence.input_ids for sequence in sequences])
        texts = [[self._start, *sequence.generated_ids] for sequence in sequences]
        tokens, mask = self._padded(texts, left=True)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        batch = PaddedBatch(cache, [len(text) for text in texts], mask, encoded, adapters=adapters)
        return batch, self._run(tokens, batch)

    def decode(self, batch: PaddedBatch, tokens: Tensor) -> Tensor:
        self._adapt(batch.adapters)
        batch.grow()
        return self._run(tokens[:, None], batch)[:, -1]

    def alone(self, sequence: RunningSequence) -> Tensor:
        tokens, mask = self._padded([sequence.input_ids], left=False)
        text, text_mask = self._padded([[self._start, *sequence.generated_ids]], left=True)
        return self._model(
            input_ids=tokens,
            attention_mask=mask,
            decoder_input_ids=text,
            decoder_attention_mask=text_mask,
            use_cache=False,
        ).logits[0]

    def _encode(self, texts: list[list[int]]) -> Encoded:
        tokens, mask = self._padded(texts, left=False)
        states = self._model.get_encoder()(input_ids=tokens, attention_mask=mask).last_hidden_state
        return Encoded(states, mask, [len(text) for text in texts])

    def _run(self, tokens: Tensor, batch: PaddedBatch) -> Tensor:
        output = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=batch.encoder_states),
            attention_mask=batch.encoder_mask,
            decoder_input_ids=tokens,
            decoder_attention_mask=batch.mask,
            past_key_values=batch.cache,
            use_cache=True,
            **self._only_last(),
        )
        return output.logits
