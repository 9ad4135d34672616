"""Decoder layers in a handful of kernels, for the architectures that most models on CPUs have.

Each takes the weights of a layer of `transformers` and stands in its place, with the same inputs and output. Whether
the result is the same is checked at load, on the logits of the whole model. `linear` is the kind of linear layer that
holds the weights.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from tgi_server.engine.attention.base import AttentionVariant
from tgi_server.engine.cpu.linear import PackedLinear
from tgi_server.engine.models.paged_cache import PagedCache
from tgi_server.engine.sharding.layers import Reduced


class FusedLayer(nn.Module):
    """A pre-norm decoder layer with the query, key and value projections joined into one."""

    def __init__(
        self, layer: Any, output: nn.Linear | Reduced, variant: AttentionVariant, linear: type[PackedLinear]
    ) -> None:
        super().__init__()
        attention = layer.self_attn
        self._index = int(attention.layer_idx)
        self._head_dim = attention.head_dim
        self._heads = attention.q_proj.out_features // self._head_dim
        self._kv_heads = attention.k_proj.out_features // self._head_dim
        self._qkv = linear.joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output = _packed(output, linear)
        self._variant = variant

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
        attended = self._attend(self._norm_attention(residual), past_key_values, position_embeddings)
        residual = self._output.add_to(residual, attended)
        return self._feed_forward(residual).unsqueeze(0)

    def _attend(self, x: Tensor, cache: PagedCache, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        assert cache.step is not None
        heads, kv_heads = self._heads, self._kv_heads
        joined = self._qkv(x).view(len(x), heads + 2 * kv_heads, self._head_dim)
        query, key, value = joined.split_with_sizes((heads, kv_heads, kv_heads), 1)
        if rotation is None:
            cache.backend.write(self._index, key, value, cache.step)
        else:
            query = cache.backend.rotate_and_write(self._index, query, key, value, rotation, cache.step)
        return cache.backend.attend(self._index, query, cache.step, self._variant).flatten(1)

    @abstractmethod
    def _norm_attention(self, x: Tensor) -> Tensor:
        """What attention is given. x: [tokens, hidden_size]."""

    @abstractmethod
    def _feed_forward(self, residual: Tensor) -> Tensor:
        """The second half of the layer, its residual included. residual: [tokens, hidden_size]."""


class FusedLlamaLayer(FusedLayer):
    """RMS norms, rotary positions, a SiLU-gated feed-forward part: Llama, Mistral, Qwen2."""

    def __init__(self, layer: Any, variant: AttentionVariant, linear: type[PackedLinear]) -> None:
        super().__init__(layer, layer.self_attn.o_proj, variant, linear)
        self._norm_1, self._norm_2 = RMSNorm(layer.input_layernorm), RMSNorm(layer.post_attention_layernorm)
        self._gate_up = linear.joined(layer.mlp.gate_proj, layer.mlp.up_proj)
        self._down = _packed(layer.mlp.down_proj, linear)

    @staticmethod
    def fits(layer: Any) -> bool:
        return isinstance(layer.mlp.act_fn, nn.SiLU) or type(layer.mlp.act_fn).__name__ == "SiLUActivation"

    def _norm_attention(self, x: Tensor) -> Tensor:
        return self._norm_1(x)

    def _feed_forward(self, residual: Tensor) -> Tensor:
        gated = torch.ops.oatmill.silu_mul(self._gate_up(self._norm_2(residual)))
        return self._down.add_to(residual, gated)


class FusedOptLayer(FusedLayer):
    """Layer norms, learned positions, a ReLU feed-forward part: OPT.

    The model of `transformers` scales the query before attention; here attention does it.
    """

    def __init__(self, layer: Any, variant: AttentionVariant, linear: type[PackedLinear]) -> None:
        super().__init__(layer, layer.self_attn.out_proj, replace(variant, scaling=layer.self_attn.scaling), linear)
        self._norm_1, self._norm_2 = layer.self_attn_layer_norm, layer.final_layer_norm
        self._up = linear(layer.fc1.weight, layer.fc1.bias)
        self._down = _packed(layer.fc2, linear)

    @staticmethod
    def fits(layer: Any) -> bool:
        return bool(layer.do_layer_norm_before) and isinstance(layer.activation_fn, nn.ReLU)

    def _norm_attention(self, x: Tensor) -> Tensor:
        return _layer_norm(self._norm_1, x)

    def _feed_forward(self, residual: Tensor) -> Tensor:
        widened = self._up(_layer_norm(self._norm_2, residual), activation="relu")
        return self._down.add_to(residual, widened)


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019) in one kernel, with the weights of `norm`."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self._weight = norm.weight
        self._eps = float(norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.oatmill.rms_norm(x, self._weight, self._eps)


def _packed(layer: nn.Linear | Reduced, linear: type[PackedLinear]) -> PackedLinear | Reduced:
    if isinstance(layer, Reduced):
        return Reduced(linear(layer.weight, layer.bias), layer.group, layer.share)
    return linear(layer.weight, layer.bias)


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


FUSED_LAYERS: dict[str, type[FusedLlamaLayer] | type[FusedOptLayer]] = {
    "LlamaDecoderLayer": FusedLlamaLayer,
    "MistralDecoderLayer": FusedLlamaLayer,
    "Qwen2DecoderLayer": FusedLlamaLayer,
    "OPTDecoderLayer": FusedOptLayer,
}
"""By the class of `transformers` whose place they take."""
