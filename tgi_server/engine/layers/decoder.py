"""Decoder layers fused into a handful of kernels, on CPUs and GPUs, for the architectures that most models have.

A fused layer takes the weights of a layer of `transformers` and stands in its place, with the same inputs and output.
A check at load compares the logits of the whole model with those of the original. `linear` makes the linear layers
that hold the weights. On a CPU, where no other code has to run between the layers, one call computes all of them, and
the rest of the model (forward.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tgi_server.engine.attention.base import AttentionVariant
from tgi_server.engine.attention.paged_cache import PagedCache
from tgi_server.engine.checkpoint.quantized import Experts
from tgi_server.engine.layers.norm import Norm, on_gpu
from tgi_server.engine.linear import LinearFactory, PackedLinear
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.parallel.layers import RowParallel

# The classes that compute an activation.
_ACTIVATIONS = {"silu": ("SiLU", "SiLUActivation"), "gelu": ("GELUTanh",)}
_QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The numbers of query heads (`heads`) and of key and value heads (`kv_heads`), and the elements of a head."""

    heads: int
    kv_heads: int
    size: int


class FusedLayer(nn.Module):
    """A pre-norm decoder layer with the query, key and value projections joined into one.

    names: of each linear layer, the names in the layer of `transformers` of those that it is made of.
    head_norms: those of each query head and of each key head; empty where there are none.
    added_norms: those of what attention and the feed-forward part add to the residual; empty where there are none.
    activation: "relu", or "silu" or "gelu" (by tanh) of a gate.
    up: in a gated layer it is the gate's projection and the up projection joined, the gate's first.
    rotation: the number of the layer's rotary tables among those of its model; None: its positions are not rotary.
    """

    activation: ClassVar[str] = "silu"
    names: ClassVar[Mapping[str, tuple[str, ...]]]

    attention_norm: Norm
    feed_forward_norm: Norm
    qkv: PackedLinear
    output: PackedLinear | RowParallel
    up: PackedLinear
    down: PackedLinear | RowParallel

    def __init__(self, layer: Any, variant: AttentionVariant, linear: LinearFactory) -> None:
        super().__init__()
        for attribute, names in self.names.items():
            setattr(self, attribute, _joined([layer.get_submodule(name) for name in names], linear))
        attention = layer.self_attn
        size = int(attention.head_dim)
        heads = _inner(self.output).in_features // size
        self.heads = AttentionHeads(heads, (self.qkv.out_features // size - heads) // 2, size)
        self.index = int(attention.layer_idx)
        norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        self.head_norms = nn.ModuleList(map(self.rms_norm, norms))
        self.added_norms = nn.ModuleList()
        self.rotation: int | None = 0
        self.variant = variant

    rms_norm = staticmethod(Norm.of_rms_norm)

    @classmethod
    def fits(cls, layer: Any, linear: LinearFactory) -> bool:
        """Returns True if it computes what the layer does, with linear layers that `linear` makes."""
        parts = [[_inner(layer.get_submodule(name)) for name in names] for names in cls.names.values()]
        return all(linear.joins(*modules) if len(modules) > 1 else linear.takes(*modules) for modules in parts)

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        past_key_values: PagedCache,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> Tensor:
        """Returns the layer's output, [1, tokens, hidden_size], as hidden_states are."""
        residual = hidden_states[0]
        attended = self._attend(self.attention_norm(residual), past_key_values, position_embeddings)
        residual = self._add_to(residual, self.output, attended, 0)
        return self._feed_forward(residual, self.feed_forward_norm(residual)).unsqueeze(0)

    def feed_forward_kernels(self) -> tuple[list[Any], Any] | None:
        """Returns the up and the down projection, and the mixture in their place or None, as the kernel takes them.

        Returns None where the kernel does not know one of them.
        """
        kernels = [linear_kernel(self.up), linear_kernel(self.down)]
        return None if any(each is None for each in kernels) else (kernels, None)

    def linears(self) -> Iterator[tuple[PackedLinear, list[tuple[str, int]]]]:
        """Yields each linear layer with the names of those that it is made of, and their numbers of outputs."""
        heads, kv_heads, size = self.heads.heads, self.heads.kv_heads, self.heads.size
        for attribute, names in self.names.items():
            linear = _inner(getattr(self, attribute))
            outputs = [linear.out_features // len(names)] * len(names)
            if names == _QUERY_KEY_VALUE:
                outputs = [heads * size, kv_heads * size, kv_heads * size]
            yield linear, list(zip(names, outputs, strict=True))

    def _attend(self, x: Tensor, cache: PagedCache, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        metadata = cache.metadata
        assert metadata is not None
        heads, kv_heads = self.heads.heads, self.heads.kv_heads
        joined = self.qkv(x).view(len(x), heads + 2 * kv_heads, self.heads.size)
        query, key, value = joined.split_with_sizes((heads, kv_heads, kv_heads), 1)
        if len(self.head_norms) > 0:
            query, key = self.head_norms[0](query), self.head_norms[1](key)
        if rotation is None or self.rotation is None:
            cache.backend.write(self.index, key, value, metadata)
        else:
            query = cache.backend.rotate_and_write(self.index, query, key, value, rotation, metadata)
        return cache.backend.attend(self.index, query, metadata, self.variant).flatten(1)

    def _feed_forward(self, residual: Tensor, x: Tensor) -> Tensor:
        """Returns residual and what the feed-forward part makes of x; both [tokens, hidden_size]."""
        return self._add_to(residual, self.down, self._widen(x), 1)

    def _add_to(self, residual: Tensor, linear: PackedLinear | RowParallel, x: Tensor, norm: int) -> Tensor:
        """Returns residual and the layer's output for x. norm: the number of the one that this goes through, if any."""
        if not self.added_norms:
            return linear.add_to(residual, x)
        output: Tensor = residual + self.added_norms[norm](linear(x))
        return output

    def _widen(self, x: Tensor) -> Tensor:
        """Returns the input of the down projection. x: [tokens, hidden_size]."""
        if self.activation == "relu":
            return self.up(x, activation="relu")
        gelu = self.activation == "gelu"
        if on_gpu(x):
            from tgi_server.engine.kernels.triton import norm_and_gate

            return norm_and_gate.gate_mul(self.up(x), gelu=gelu)
        return torch.ops.oatmill.gate_mul(self.up(x), gelu)


class FusedLlamaLayer(FusedLayer):
    """RMS norms, rotary positions, a SiLU-gated feed-forward part: Llama, Mistral, Qwen2, Qwen3."""

    names: ClassVar = {
        "qkv": _QUERY_KEY_VALUE,
        "output": ("self_attn.o_proj",),
        "up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }

    def __init__(self, layer: Any, variant: AttentionVariant, linear: LinearFactory) -> None:
        super().__init__(layer, variant, linear)
        self.attention_norm = self.rms_norm(layer.input_layernorm)
        self.feed_forward_norm = self.rms_norm(layer.post_attention_layernorm)

    @classmethod
    def fits(cls, layer: Any, linear: LinearFactory) -> bool:
        if hasattr(layer.mlp, "experts"):
            return False
        activation = layer.mlp.activation_fn if hasattr(layer.mlp, "activation_fn") else layer.mlp.act_fn
        return type(activation).__name__ in _ACTIVATIONS[cls.activation] and super().fits(layer, linear)


class FusedGemmaLayer(FusedLlamaLayer):
    """A layer of Llama's kind with Gemma's norms, and GELU for its gate: Gemma."""

    activation = "gelu"
    rms_norm = staticmethod(Norm.of_gemma_norm)


class FusedGemma2Layer(FusedGemmaLayer):
    """A layer of Gemma's kind with norms behind attention and the feed-forward part as well: Gemma 2."""

    def __init__(self, layer: Any, variant: AttentionVariant, linear: LinearFactory) -> None:
        super().__init__(layer, variant, linear)
        self.feed_forward_norm = self.rms_norm(layer.pre_feedforward_layernorm)
        norms = (layer.post_attention_layernorm, layer.post_feedforward_layernorm)
        self.added_norms = nn.ModuleList(map(self.rms_norm, norms))


class FusedGemma3Layer(FusedGemma2Layer):
    """A layer of Gemma 2's kind whose rotary embeddings are those of its type: Gemma 3."""

    def __init__(self, layer: Any, variant: AttentionVariant, linear: LinearFactory) -> None:
        super().__init__(layer, variant, linear)
        attention = layer.self_attn
        self.rotation = layer_types(attention.config).index(attention.layer_type)


class FusedSmolLM3Layer(FusedLlamaLayer):
    """A layer of Llama's kind whose positions may not be rotary: SmolLM3."""

    def __init__(self, layer: Any, variant: AttentionVariant, linear: LinearFactory) -> None:
        super().__init__(layer, variant, linear)
        self.rotation = 0 if layer.self_attn.use_rope else None


class FusedPhi3Layer(FusedLlamaLayer):
    """A layer of Llama's kind whose checkpoint has the projections joined already: Phi-3."""

    names: ClassVar = {
        "qkv": ("self_attn.qkv_proj",),
        "output": ("self_attn.o_proj",),
        "up": ("mlp.gate_up_proj",),
        "down": ("mlp.down_proj",),
    }


class FusedMixtureLayer(FusedLayer):
    """RMS norms, rotary positions, a mixture of experts as the feed-forward part: Mixtral, Qwen3-MoE.

    mlp: the module of `transformers`; its experts may be packed.
    """

    names: ClassVar = {"qkv": _QUERY_KEY_VALUE, "output": ("self_attn.o_proj",)}

    def __init__(self, layer: Any, variant: AttentionVariant, linear: LinearFactory) -> None:
        super().__init__(layer, variant, linear)
        self.attention_norm = Norm.of_rms_norm(layer.input_layernorm)
        self.feed_forward_norm = Norm.of_rms_norm(layer.post_attention_layernorm)
        self.mlp = layer.mlp

    @classmethod
    def fits(cls, layer: Any, linear: LinearFactory) -> bool:
        return hasattr(layer.mlp, "experts") and super().fits(layer, linear)

    def feed_forward_kernels(self) -> tuple[list[Any], Any] | None:
        router, experts = getattr(self.mlp, "gate", None) or self.mlp.router, self.mlp.experts
        if not isinstance(experts, Experts) or not FloatLinear.supports(router.weight.dtype):
            return None
        kernel = experts.kernel()
        if kernel is None:
            return None
        normalised = bool(getattr(router, "norm_topk_prob", True))
        routing = FloatLinear(router.weight, getattr(router, "bias", None)).kernel()
        return [], torch.classes.oatmill.Mixture(routing, kernel, router.top_k, normalised)

    def _feed_forward(self, residual: Tensor, x: Tensor) -> Tensor:
        output = self.mlp(x.unsqueeze(0))
        output = output[0] if isinstance(output, tuple) else output  # beside it, what the router says
        return residual + output[0]


class FusedGptOssLayer(FusedMixtureLayer):
    """A mixture whose model may give rotary tables of half of a head; they are the same for the other half: gpt-oss."""

    def _attend(self, x: Tensor, cache: PagedCache, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        metadata = cache.metadata
        assert metadata is not None
        assert rotation is not None
        cosine, sine = rotation
        if 2 * cosine.shape[-1] == self.heads.size:
            rotation = metadata.made("rotation", lambda: (cosine.repeat(1, 1, 2), sine.repeat(1, 1, 2)))
        return super()._attend(x, cache, rotation)


class FusedOptLayer(FusedLayer):
    """Layer norms, learned positions, a ReLU feed-forward part: OPT.

    The model of `transformers` scales the query before attention; here attention does it.
    """

    activation = "relu"
    names: ClassVar = {
        "qkv": _QUERY_KEY_VALUE,
        "output": ("self_attn.out_proj",),
        "up": ("fc1",),
        "down": ("fc2",),
    }

    def __init__(self, layer: Any, variant: AttentionVariant, linear: LinearFactory) -> None:
        super().__init__(layer, replace(variant, scaling=layer.self_attn.scaling), linear)
        self.rotation = None
        self.attention_norm = Norm.of_layer_norm(layer.self_attn_layer_norm)
        self.feed_forward_norm = Norm.of_layer_norm(layer.final_layer_norm)

    @classmethod
    def fits(cls, layer: Any, linear: LinearFactory) -> bool:
        plain_norms = layer.final_layer_norm.weight is not None and layer.final_layer_norm.bias is not None
        known = bool(layer.do_layer_norm_before) and isinstance(layer.activation_fn, nn.ReLU) and plain_norms
        return known and super().fits(layer, linear)


def _inner(module: Any) -> Any:
    """Returns the linear layer of a part of which each shard computes a part of the sum, or else the part."""
    return module.inner if isinstance(module, RowParallel) else module


def _joined(modules: list[Any], linear: LinearFactory) -> PackedLinear | RowParallel:
    """Returns one layer for linear layers with the same input."""
    if len(modules) > 1:
        return linear.joined(*modules)
    (module,) = modules
    made = linear(_inner(module))
    return RowParallel(made, module.group, module.share) if isinstance(module, RowParallel) else made


def linear_kernel(layer: nn.Module) -> Any:
    """Returns a linear layer in the form that `torch.classes.oatmill.Decoder` takes, or None if it cannot take it."""
    return layer.kernel() if isinstance(layer, PackedLinear) else None


def layer_types(config: Any) -> list[str]:
    """Returns the types of layers of a model, in the order of their rotary tables."""
    return sorted(set(config.layer_types))


# By the class of `transformers` whose place they take.
FUSED_LAYERS: dict[str, tuple[type[FusedLayer], ...]] = {
    "Gemma2DecoderLayer": (FusedGemma2Layer,),
    "Gemma3DecoderLayer": (FusedGemma3Layer,),
    "GemmaDecoderLayer": (FusedGemmaLayer,),
    "GptOssDecoderLayer": (FusedGptOssLayer,),
    "LlamaDecoderLayer": (FusedLlamaLayer,),
    "MistralDecoderLayer": (FusedLlamaLayer,),
    "MixtralDecoderLayer": (FusedMixtureLayer,),
    "OPTDecoderLayer": (FusedOptLayer,),
    "Phi3DecoderLayer": (FusedPhi3Layer,),
    "Qwen2DecoderLayer": (FusedLlamaLayer,),
    "Qwen3DecoderLayer": (FusedLlamaLayer,),
    "Qwen3MoeDecoderLayer": (FusedMixtureLayer, FusedLlamaLayer),
    "SmolLM3DecoderLayer": (FusedSmolLM3Layer,),
}
