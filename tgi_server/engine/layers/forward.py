"""A whole model in one kernel call, on CPUs: for the architectures that are known, of whatever a step consists.

The forward pass of a model of `transformers` makes masks, reads its configuration and collects outputs of every kind.
When all layers are one kernel call, that would take most of the time that Python spends in a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tgi_server.engine.attention.base import ForwardMetadata, GreedyOnly
from tgi_server.engine.attention.cpu import CpuAttention
from tgi_server.engine.attention.paged_cache import PagedCache
from tgi_server.engine.layers.decoder import FusedLayer, layer_types, linear_kernel
from tgi_server.engine.layers.head import ScreenedHead
from tgi_server.engine.layers.norm import Norm
from tgi_server.engine.layers.rope import RotaryTable
from tgi_server.engine.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The result of a pass. logits: [1, tokens, vocab_size]."""

    logits: Tensor


class WholeModel:
    """A model in one kernel call, from the tokens of any pass to logits. It may be called as the model is."""

    def __init__(self, kernel: Any, rotary: Sequence[RotaryTable], like: Tensor) -> None:
        """kernel: a `torch.classes.oatmill.CausalLM`. rotary, like: what makes rotary tables, of each kind."""
        self._kernel = kernel
        self._rotary = rotary
        self._like = like
        self._adapters = torch.empty(0, dtype=torch.int32)
        self._keep: Callable[[list[Tensor]], None] | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, decoder: Any) -> Self | None:
        """Returns the model around its layers, a `torch.classes.oatmill.Decoder`; None where the kernel cannot take it.

        A model that is split over several shards is one: the shards exchange results in the middle of it.
        """
        architecture = _ARCHITECTURES[type(model).__name__](model)
        head = model.get_output_embeddings()
        linear = head.kernel() if isinstance(head, PackedLinear) else None
        if linear is None or not architecture.known:
            return None
        screen, screened_rows = head.screen if isinstance(head, ScreenedHead) else ([], 0)
        places, embedding = architecture.positions, architecture.inside.embed_tokens.weight
        kernel = torch.classes.oatmill.CausalLM(
            decoder,
            embedding,
            architecture.scale,
            None if places is None else places.weight[places.offset :],
            None if architecture.norm is None else architecture.norm.kernel(),
            linear,
            1.0,
            architecture.softcap,
            screen,
            screened_rows,
        )
        return cls(kernel, architecture.rotary, embedding)

    def attach_cache(self, backend: CpuAttention) -> None:
        """Takes the backend's KV blocks, which all later passes read and write."""
        self._kernel.attach_cache(backend.keys, backend.values, backend.key_scales, backend.value_scales)

    def attach_rows(self, tokens: Tensor, positions: Tensor, tables: Tensor, adapters: Tensor, block_size: int) -> None:
        """Takes what `decode` reads and writes.

        tokens, positions: [rows] int64. tables: [rows, blocks] int32. adapters: [rows] int32.
        """
        self._adapters = adapters
        self._kernel.attach_rows(tokens, positions, tables, adapters, block_size)

    def tap(self, layers: Sequence[int], keep: Callable[[list[Tensor]], None]) -> None:
        """Has every pass call `keep` with the head's input, [rows, hidden_size], and the inputs of some layers.

        layers: their indices, in ascending order; the inputs are [tokens, hidden_size].
        """
        self._keep = keep
        self._kernel.tap(list(layers))

    def decode(
        self, rows: int, longest: int, greedy: GreedyOnly | None, *, adapted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the logits of the first rows, [rows, vocab_size], and the likeliest tokens, [rows] int64, or None.

        The rows' positions move on. Where greedy rows have no mask, the likeliest tokens are the next inputs of the
        rows, too. longest: at least the most tokens that any row has, this one included. adapted: a row has an adapter.
        """
        mask = greedy.mask if greedy else None
        logits, likeliest, taps = self._kernel.decode(
            rows, *self._tables(longest), adapted, greedy is not None, mask is None
        )
        adapters = self._adapters[:rows] if adapted else None
        return self._finished(logits, taps, adapters, greedy), likeliest

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor | None,
        metadata: ForwardMetadata,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Returns the logits of the wanted tokens, [rows, vocab_size].

        tokens, positions: [tokens] int64. wanted: [rows] int64, in order, each sequence's last ones; None: all.
        adapters: [tokens] int32, the number of each token's adapter; None: none has one.
        """
        greedy = metadata.greedy
        logits, taps = self._kernel.forward(
            tokens,
            positions,
            metadata.slots,
            metadata.block_tables,
            metadata.kv_lengths,
            metadata.query_starts,
            *self._tables(metadata.max_kv_length),
            wanted,
            adapters,
            greedy is not None,
            greedy is None or greedy.mask is None,
        )
        if adapters is not None and wanted is not None:
            adapters = adapters[wanted]
        return self._finished(logits, taps, adapters, greedy)

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: PagedCache,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> ForwardOutput:
        """Computes a pass over another backend's KV blocks, as a model of `transformers` would."""
        backend, metadata = past_key_values.backend, past_key_values.metadata
        assert isinstance(backend, CpuAttention)
        assert metadata is not None
        self.attach_cache(backend)
        wanted = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        return ForwardOutput(self.forward(input_ids[0], position_ids[0], wanted, metadata)[None])

    def _finished(
        self, output: Tensor, taps: list[Tensor], adapters: Tensor | None, greedy: GreedyOnly | None
    ) -> Tensor:
        """Returns logits. output: those, or the head's input where there are masks, which may not be ready yet."""
        if self._keep is not None:
            self._keep(taps)
        if greedy is None or greedy.mask is None:
            return output
        mask = greedy.mask.wait()
        logits: Tensor = self._kernel.logits(output, adapters, True, mask.bits, list(mask.positions))
        return logits

    def _tables(self, length: int) -> tuple[list[Tensor], list[Tensor]]:
        tables = [kind.tables(self._like, length) for kind in self._rotary]
        return [cosines for cosines, _ in tables], [sines for _, sines in tables]


def decoder_kernel(model: nn.Module) -> Any:
    """Returns the layers of a model as a `torch.classes.oatmill.Decoder`; None where the kernel cannot take them.

    A layer that is not fused, or that is split over several shards, is one.
    """
    if type(model).__name__ not in _ARCHITECTURES:
        return None
    layers = _ARCHITECTURES[type(model).__name__].inside_of(model).layers
    if not all(isinstance(layer, FusedLayer) for layer in layers):
        return None
    heads = layers[0].heads
    kernel = torch.classes.oatmill.Decoder(
        heads.heads, heads.kv_heads, heads.size, layers[0].activation, False, 1.0, False
    )
    return kernel if all(_add(kernel, layer) for layer in layers) else None


def _add(kernel: Any, layer: FusedLayer) -> bool:
    """Returns True if the kernel knows all that the layer is made of, and has it."""
    qkv, output, feed_forward = linear_kernel(layer.qkv), linear_kernel(layer.output), layer.feed_forward_kernels()
    if qkv is None or output is None or feed_forward is None:
        return False
    query_norm, key_norm = [cast(Norm, norm).kernel() for norm in layer.head_norms] or (None, None)
    attended_norm, fed_norm = [cast(Norm, norm).kernel() for norm in layer.added_norms] or (None, None)
    norms = [layer.attention_norm.kernel(), query_norm, key_norm, attended_norm]
    norms += [layer.feed_forward_norm.kernel(), fed_norm]
    variant, rotation = layer.variant, -1 if layer.rotation is None else layer.rotation
    scores = variant.scaling, variant.window, variant.softcap, variant.sinks
    kernel.add_layer(norms, qkv, output, *feed_forward, rotation, *scores)
    return True


class _Architecture:
    """All of a model but its decoder layers.

    inside: the module that holds all of it but its head. positions: the embedding of positions, where they are learned,
    with its `offset`. rotary: what turns queries and keys, where positions are rotary, of each kind of layers.
    norm: the last one. scale: what embeddings are multiplied by. softcap: of the logits. known: False: there is more.
    """

    positions: Any = None
    rotary: Sequence[RotaryTable] = ()
    scale = 1.0
    norm: Norm | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self.inside = self.inside_of(model)
        self.softcap = float(getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0)
        self.known = type(self.inside.embed_tokens) is nn.Embedding

    @staticmethod
    def inside_of(model: Any) -> Any:
        return model.model


class _Llama(_Architecture):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.rotary = [RotaryTable(self.inside.rotary_emb)]
        self.norm = Norm.of_rms_norm(self.inside.norm)


class _GptOss(_Llama):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.rotary = [RotaryTable(self.inside.rotary_emb, halved=True)]


class _Gemma(_Architecture):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        inside = self.inside
        self.rotary = [RotaryTable(inside.rotary_emb)]
        self.norm = Norm.of_gemma_norm(inside.norm)
        self.scale = float(torch.tensor(inside.config.hidden_size**0.5, dtype=inside.embed_tokens.weight.dtype))
        self.known = isinstance(inside.embed_tokens, nn.Embedding)  # it multiplies by the scale itself


class _Gemma3(_Gemma):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        rope = self.inside.rotary_emb
        self.rotary = [RotaryTable(rope, layer_type=kind) for kind in layer_types(self.inside.config)]

    @staticmethod
    def inside_of(model: Any) -> Any:
        return getattr(model.model, "language_model", model.model)  # that of a model which sees images, too


class _Opt(_Architecture):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        inside = self.inside
        self.norm = Norm.of_layer_norm(inside.final_layer_norm) if inside.final_layer_norm is not None else None
        self.positions = inside.embed_positions
        self.known = self.known and inside.project_in is None and inside.project_out is None

    @staticmethod
    def inside_of(model: Any) -> Any:
        return model.model.decoder


# By the class of `transformers`.
_ARCHITECTURES: dict[str, type[_Architecture]] = {
    "Gemma2ForCausalLM": _Gemma,
    "Gemma3ForCausalLM": _Gemma3,
    "Gemma3ForConditionalGeneration": _Gemma3,
    "GemmaForCausalLM": _Gemma,
    "GptOssForCausalLM": _GptOss,
    "LlamaForCausalLM": _Llama,
    "MistralForCausalLM": _Llama,
    "MixtralForCausalLM": _Llama,
    "OPTForCausalLM": _Opt,
    "Phi3ForCausalLM": _Llama,
    "Qwen2ForCausalLM": _Llama,
    "Qwen3ForCausalLM": _Llama,
    "Qwen3MoeForCausalLM": _Llama,
    "SmolLM3ForCausalLM": _Llama,
}
