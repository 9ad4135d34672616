"""A short forward pass for models whose decoder layers are one kernel call.

The forward pass of a model of `transformers` makes masks, reads its configuration and collects outputs of every kind.
When all layers are one kernel call, that takes most of the time that Python spends in a step. Here a pass does no more
than embed the tokens, call the layers, and apply the last norm and the head. Where nothing else is asked for, all of
that is one kernel call.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from tgi_server.engine.attention.base import ForwardMetadata
from tgi_server.engine.attention.cpu import CpuAttention
from tgi_server.engine.attention.paged_cache import PagedCache
from tgi_server.engine.layers.decoder import layer_types
from tgi_server.engine.layers.head import ScreenedHead
from tgi_server.engine.layers.norm import Norm
from tgi_server.engine.layers.rope import RotaryTable
from tgi_server.engine.layers.stack import LayerStack
from tgi_server.engine.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The result of a pass. logits: [1, tokens, vocab_size]."""

    logits: Tensor


class WholeModel:
    """A model in one kernel call, from the tokens of a batch, or of any pass without adapters, to logits."""

    def __init__(self, kernel: Any, rotary: Sequence[RotaryTable], like: Tensor) -> None:
        """kernel: a `torch.classes.oatmill.CausalLM`. rotary, like: what makes rotary tables, of each kind."""
        self._kernel = kernel
        self._rotary = rotary
        self._like = like

    def decode(self, rows: int, longest: int, *, greedy: bool) -> tuple[Tensor, Tensor | None] | None:
        """Returns the logits of the first rows, [rows, vocab_size], and if `greedy` the likeliest tokens, [rows] int64.

        The rows' positions move on. greedy: no more than that is needed of the logits, and the tokens are the next
        inputs of the rows. longest: at least the most tokens that any row has, this one included. None: the model's
        rotary positions are not fixed yet.
        """
        tables = self._tables(longest)
        if tables is None:
            return None
        logits, likeliest = self._kernel.decode(rows, *tables, greedy)
        return logits, likeliest

    def forward(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor | None, metadata: ForwardMetadata
    ) -> Tensor | None:
        """Returns the logits of the wanted tokens, [rows, vocab_size]; None where `decode` returns it.

        tokens, positions: [tokens] int64. wanted: [rows] int64, in order, each sequence's last ones; None: all. The
        metadata's greedy rows have no mask.
        """
        tables = self._tables(metadata.max_kv_length)
        if tables is None:
            return None
        logits: Tensor = self._kernel.forward(
            tokens,
            positions,
            metadata.slots,
            metadata.block_tables,
            metadata.kv_lengths,
            metadata.query_starts,
            *tables,
            wanted,
            metadata.greedy is not None,
        )
        return logits

    def _tables(self, length: int) -> tuple[list[Tensor], list[Tensor]] | None:
        cosines, sines = [], []
        for kind in self._rotary:
            tables = kind.tables(self._like, length)
            if tables is None:
                return None
            cosines.append(tables[0])
            sines.append(tables[1])
        return cosines, sines


def has_short_forward(model: nn.Module) -> bool:
    """Returns True for a model of a known architecture, whose logits are what the head gives."""
    if type(model).__name__ not in _FORWARDS:
        return False
    return not getattr(cast(PreTrainedModel, model).config.get_text_config(), "final_logit_softcapping", None)


def shorten_forward(model: nn.Module) -> None:
    """Replaces the model's forward, if it is known and its layers are in a LayerStack or a few."""
    if has_short_forward(model):
        forward = _FORWARDS[type(model).__name__]
        if isinstance(forward.inside(model).layers[0], LayerStack):
            model.forward = forward(model)


class Forward(ABC):
    """The steps of one architecture before and after its decoder layers.

    positions: the embedding of positions, where they are learned, with its `offset`. rotary: what turns queries and
    keys, where positions are rotary, of each kind of layers. norm: the last one. scale: what embeddings are multiplied
    by. projected: True if the layers' input or output is not what the embedding gives and the head takes.
    """

    positions: Any = None
    rotary: Sequence[RotaryTable] = ()
    scale = 1.0
    norm: Norm | None = None
    projected = False

    def __init__(self, model: PreTrainedModel) -> None:
        self._inside = self.inside(model)
        self._head = model.get_output_embeddings()

    @staticmethod
    @abstractmethod
    def inside(model: Any) -> Any:
        """Returns the module that holds all of a model but its head."""

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: PagedCache,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> ForwardOutput:
        metadata = past_key_values.metadata
        assert metadata is not None
        hidden, rotation = self._before(input_ids, position_ids, metadata.max_kv_length)
        wanted = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        *stacks, last = self._inside.layers
        for layers in stacks:
            hidden = layers(hidden, past_key_values=past_key_values, position_embeddings=rotation)
        hidden = last(hidden, past_key_values=past_key_values, position_embeddings=rotation, wanted=wanted)
        hidden = self._after(hidden)
        if isinstance(self._head, ScreenedHead):
            return ForwardOutput(self._head(hidden, metadata=metadata))
        return ForwardOutput(self._head(hidden))

    def whole(self, backend: CpuAttention, tokens: Tensor, positions: Tensor, tables: Tensor) -> WholeModel | None:
        """Returns a WholeModel for the rows that these tensors are of; None if the kernel does not know all of it.

        tokens, positions: [rows] int64. tables: [rows, blocks] int32, of blocks of the backend.
        """
        embedded, head = self._inside.embed_tokens, self._head
        layers, linear = self._inside.layers, head.kernel() if isinstance(head, PackedLinear) else None
        known = type(embedded) is nn.Embedding or self.scale != 1
        if len(layers) > 1 or linear is None or self.projected or not known:
            return None
        places = self.positions
        screen, screened_rows = head.screen if isinstance(head, ScreenedHead) else ([], 0)
        kernel = torch.classes.oatmill.CausalLM(
            layers[0].kernel,
            embedded.weight,
            self.scale,
            None if places is None else places.weight[places.offset :],
            None if self.norm is None else self.norm.kernel(),
            linear,
            screen,
            screened_rows,
        )
        caches = backend.keys, backend.values, backend.key_scales, backend.value_scales
        kernel.attach(tokens, positions, tables, backend.block_size, *caches)
        return WholeModel(kernel, self.rotary, embedded.weight)

    @abstractmethod
    def _before(self, tokens: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Sequence[tuple[Tensor, Tensor]]]:
        """Returns the layers' input and each kind of rotary tables. tokens, positions: [1, tokens], below `length`."""

    @abstractmethod
    def _after(self, hidden: Tensor) -> Tensor:
        """Returns the head's input, given the layers' output."""


class _LlamaForward(Forward):
    norm: Norm

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.rotary = [RotaryTable(self._inside.rotary_emb)]
        self.norm = Norm.of_rms_norm(self._inside.norm)

    @staticmethod
    def inside(model: Any) -> Any:
        return model.model

    def _before(self, tokens: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Sequence[tuple[Tensor, Tensor]]]:
        hidden = self._embed(tokens)
        return hidden, [kind(hidden, positions, length) for kind in self.rotary]

    def _embed(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self._inside.embed_tokens(tokens)
        return hidden

    def _after(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class _GptOssForward(_LlamaForward):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.rotary = [RotaryTable(self._inside.rotary_emb, halved=True)]


class _GemmaForward(_LlamaForward):
    def __init__(self, model: PreTrainedModel) -> None:
        Forward.__init__(self, model)
        inside = self._inside
        self.rotary = [RotaryTable(inside.rotary_emb)]
        self.norm = Norm.of_gemma_norm(inside.norm)
        self.scale = float(torch.tensor(inside.config.hidden_size**0.5, dtype=inside.embed_tokens.weight.dtype))

    def _embed(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self._inside.embed_tokens.weight) * self.scale


class _Gemma3Forward(_GemmaForward):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        rope = self._inside.rotary_emb
        self.rotary = [RotaryTable(rope, layer_type=kind) for kind in layer_types(self._inside.config)]

    @staticmethod
    def inside(model: Any) -> Any:
        return getattr(model.model, "language_model", model.model)  # that of a model which sees images, too


class _OptForward(Forward):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        norm = self._inside.final_layer_norm
        self.norm = Norm.of_layer_norm(norm) if norm is not None else None
        self.positions = self._inside.embed_positions
        self.projected = self._inside.project_in is not None or self._inside.project_out is not None

    @staticmethod
    def inside(model: Any) -> Any:
        return model.model.decoder

    def _before(self, tokens: Tensor, positions: Tensor, length: int) -> tuple[Tensor, tuple[()]]:
        inside, places = self._inside, self.positions
        hidden = inside.embed_tokens(tokens)
        if inside.project_in is not None:
            hidden = inside.project_in(hidden)
        return hidden + embedding(positions + places.offset, places.weight), ()

    def _after(self, hidden: Tensor) -> Tensor:
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self._inside.project_out is not None:
            hidden = self._inside.project_out(hidden)
        return hidden


# By the class of `transformers`.
_FORWARDS: dict[str, type[Forward]] = {
    "Gemma3ForCausalLM": _Gemma3Forward,
    "Gemma3ForConditionalGeneration": _Gemma3Forward,
    "GemmaForCausalLM": _GemmaForward,
    "GptOssForCausalLM": _GptOssForward,
    "LlamaForCausalLM": _LlamaForward,
    "MistralForCausalLM": _LlamaForward,
    "MixtralForCausalLM": _LlamaForward,
    "OPTForCausalLM": _OptForward,
    "Phi3ForCausalLM": _LlamaForward,
    "Qwen2ForCausalLM": _LlamaForward,
    "Qwen3ForCausalLM": _LlamaForward,
    "Qwen3MoeForCausalLM": _LlamaForward,
    "SmolLM3ForCausalLM": _LlamaForward,
}
