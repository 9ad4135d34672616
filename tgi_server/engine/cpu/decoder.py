"""Decoder layers in a handful of kernels, for the architectures that most models on CPUs have.

Each takes the weights of a layer of `transformers` and stands in its place, with the same inputs and output. Whether
the result is the same is checked at load, on the logits of the whole model. `linear` is the kind of linear layer that
holds the weights. Where nothing has to happen between them, `stack.py` runs all layers in one call.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine.attention.base import AttentionVariant
from tgi_server.engine.attention.paged_cache import PagedCache
from tgi_server.engine.cpu.linear import PackedLinear
from tgi_server.engine.cpu.norm import Norm
from tgi_server.engine.sharding.layers import Reduced


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """heads: of the queries. kv_heads: of keys and values. size: elements of each."""

    heads: int
    kv_heads: int
    size: int


class FusedLayer(nn.Module):
    """A pre-norm decoder layer with the query, key and value projections joined into one.

    up: holds the gate's projection, too, and before the other one, where the layer is gated.
    """

    gated: bool

    attention_norm: Norm
    feed_forward_norm: Norm
    up: PackedLinear
    down: PackedLinear | Reduced

    def __init__(
        self, layer: Any, output: nn.Linear | Reduced, variant: AttentionVariant, linear: type[PackedLinear]
    ) -> None:
        super().__init__()
        attention = layer.self_attn
        size = int(attention.head_dim)
        self.heads = AttentionHeads(attention.q_proj.out_features // size, attention.k_proj.out_features // size, size)
        self.index = int(attention.layer_idx)
        self.qkv = linear.joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = _packed(output, linear)
        self.variant = variant

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        past_key_values: PagedCache,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> Tensor:
        """hidden_states: [1, tokens, hidden_size], as is the result."""
        residual = hidden_states[0]
        attended = self._attend(self.attention_norm(residual), past_key_values, position_embeddings)
        residual = self.output.add_to(residual, attended)
        widened = self._widen(self.feed_forward_norm(residual))
        return self.down.add_to(residual, widened).unsqueeze(0)

    def _attend(self, x: Tensor, cache: PagedCache, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        assert cache.metadata is not None
        heads, kv_heads = self.heads.heads, self.heads.kv_heads
        joined = self.qkv(x).view(len(x), heads + 2 * kv_heads, self.heads.size)
        query, key, value = joined.split_with_sizes((heads, kv_heads, kv_heads), 1)
        if rotation is None:
            cache.backend.write(self.index, key, value, cache.metadata)
        else:
            query = cache.backend.rotate_and_write(self.index, query, key, value, rotation, cache.metadata)
        return cache.backend.attend(self.index, query, cache.metadata, self.variant).flatten(1)

    def _widen(self, x: Tensor) -> Tensor:
        """The first part of the feed-forward part. x: [tokens, hidden_size]."""
        return torch.ops.oatmill.silu_mul(self.up(x)) if self.gated else self.up(x, activation="relu")


class FusedLlamaLayer(FusedLayer):
    """RMS norms, rotary positions, a SiLU-gated feed-forward part: Llama, Mistral, Qwen2."""

    gated = True

    def __init__(self, layer: Any, variant: AttentionVariant, linear: type[PackedLinear]) -> None:
        super().__init__(layer, layer.self_attn.o_proj, variant, linear)
        self.attention_norm = Norm.of_rms_norm(layer.input_layernorm)
        self.feed_forward_norm = Norm.of_rms_norm(layer.post_attention_layernorm)
        self.up = linear.joined(layer.mlp.gate_proj, layer.mlp.up_proj)
        self.down = _packed(layer.mlp.down_proj, linear)

    @staticmethod
    def fits(layer: Any) -> bool:
        return isinstance(layer.mlp.act_fn, nn.SiLU) or type(layer.mlp.act_fn).__name__ == "SiLUActivation"


class FusedOptLayer(FusedLayer):
    """Layer norms, learned positions, a ReLU feed-forward part: OPT.

    The model of `transformers` scales the query before attention; here attention does it.
    """

    gated = False

    def __init__(self, layer: Any, variant: AttentionVariant, linear: type[PackedLinear]) -> None:
        super().__init__(layer, layer.self_attn.out_proj, replace(variant, scaling=layer.self_attn.scaling), linear)
        self.attention_norm = Norm.of_layer_norm(layer.self_attn_layer_norm)
        self.feed_forward_norm = Norm.of_layer_norm(layer.final_layer_norm)
        self.up = linear(layer.fc1.weight, layer.fc1.bias)
        self.down = _packed(layer.fc2, linear)

    @staticmethod
    def fits(layer: Any) -> bool:
        plain_norms = layer.final_layer_norm.weight is not None and layer.final_layer_norm.bias is not None
        return bool(layer.do_layer_norm_before) and isinstance(layer.activation_fn, nn.ReLU) and plain_norms


def _packed(layer: nn.Linear | Reduced, linear: type[PackedLinear]) -> PackedLinear | Reduced:
    if isinstance(layer, Reduced):
        return Reduced(linear(layer.weight, layer.bias), layer.group, layer.share)
    return linear(layer.weight, layer.bias)


FUSED_LAYERS: dict[str, type[FusedLlamaLayer] | type[FusedOptLayer]] = {
    "LlamaDecoderLayer": FusedLlamaLayer,
    "MistralDecoderLayer": FusedLlamaLayer,
    "Qwen2DecoderLayer": FusedLlamaLayer,
    "OPTDecoderLayer": FusedOptLayer,
}
"""By the class of `transformers` whose place they take."""
