"""Decoder layers from a few kernels, on GPUs, and on CPUs where a model cannot be one call (cpu.py).

Such a layer takes the weights of a layer of `transformers` and stands in its place, with the same inputs and output. A
check at load compares the logits of the whole model with those of the original.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.attention.paged_cache import PagedCache
from tgi_server.engine.backends.norm import Norm, on_gpu
from tgi_server.engine.backends.rope import repeated
from tgi_server.engine.checkpoint.quantized import Experts
from tgi_server.engine.linear import LinearFactory, PackedLinear
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.models.spec import DecoderSpec, LayerSpec
from tgi_server.engine.parallel.layers import RowParallel, ShardedLayer

# Of LayerSpec, in the order of a layer's steps.
NORMS = ("attention_norm", "query_norm", "key_norm", "attended_norm", "feed_forward_norm", "fed_norm")


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The numbers of query heads (`heads`) and of key and value heads (`kv_heads`), and the elements of a head."""

    heads: int
    kv_heads: int
    size: int


class DecoderLayer(nn.Module):
    """A layer by its spec, with the query, key and value projections joined into one, and gate and up projection.

    qkv, output, up, down: the linear layers; the last two are None where `mixture`, a module of `transformers` whose
    experts may be packed, is the feed-forward part. norms: by their names in LayerSpec, those that there are.
    """

    qkv: PackedLinear
    output: PackedLinear | RowParallel
    up: PackedLinear | None
    down: PackedLinear | RowParallel | None

    def __init__(
        self, layer: nn.Module, model: DecoderSpec, spec: LayerSpec, variant: AttentionVariant, linear: LinearFactory
    ) -> None:
        """layer: of `transformers`. variant: how it attends. linear: makes linear layers."""
        super().__init__()
        self.spec = spec
        self.model = model
        self._names = _linear_names(spec)
        if spec.mixture:
            self.up = self.down = None
        for attribute, names in self._names.items():
            setattr(self, attribute, _joined([layer.get_submodule(name) for name in names], linear))
        self.mixture: Any = layer.get_submodule(spec.mixture[0]) if spec.mixture else None
        norms = {name: layer.get_submodule(path) for name, path in _norm_names(spec).items()}
        self.norms = nn.ModuleDict({name: Norm.of(module, model.norms) for name, module in norms.items()})
        attention: Any = layer.get_submodule(spec.attention)
        size = int(attention.head_dim)
        heads = _inner(self.output).in_features // size
        self.heads = AttentionHeads(heads, (self.qkv.out_features // size - heads) // 2, size)
        self.index = int(attention.layer_idx)
        self.variant = variant

    @staticmethod
    def fits(layer: nn.Module, spec: LayerSpec, linear: LinearFactory) -> bool:
        """Returns True if the layer has what its spec says, in linear layers of which `linear` makes others."""
        try:
            parts = [[layer.get_submodule(name) for name in names] for names in _linear_names(spec).values()]
            norms = [layer.get_submodule(name) for name in _norm_names(spec).values()]
            mixed = spec.mixture is not None and hasattr(layer.get_submodule(spec.mixture[0]), "experts")
        except AttributeError:
            return False
        if mixed != (spec.mixture is not None) or any(isinstance(norm, ShardedLayer) for norm in norms):
            return False
        inner = [list(map(_inner, modules)) for modules in parts]
        return all(linear.joins(*modules) if len(modules) > 1 else linear.takes(*modules) for modules in inner)

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
        normed = self._normed("attention_norm", residual)
        attended = self._attend(normed, past_key_values, position_embeddings)
        residual = self._add_to(residual, self.output, attended, "attended_norm")
        if not self.model.parallel:
            normed = self._normed("feed_forward_norm", residual)
        return self._feed_forward(residual, normed).unsqueeze(0)

    def feed_forward_kernels(self) -> tuple[list[Any], Any] | None:
        """Returns the up and the down projection, and the mixture in their place or None, as the kernel takes them.

        Returns None where the kernel does not know one of them.
        """
        if self.spec.mixture is None:
            kernels = [linear_kernel(self.up), linear_kernel(self.down)]
            return None if any(each is None for each in kernels) else (kernels, None)
        router, experts = getattr(self.mixture, self.spec.mixture[1]), _inner(self.mixture.experts)
        if not isinstance(experts, Experts) or not FloatLinear.supports(router.weight.dtype):
            return None
        kernel = experts.kernel()
        if kernel is None:
            return None
        normalised = bool(getattr(router, "norm_topk_prob", True))
        routing = FloatLinear(router.weight, getattr(router, "bias", None)).kernel()
        return [], torch.classes.oatmill.Mixture(routing, kernel, router.top_k, normalised)

    def linears(self) -> Iterator[tuple[PackedLinear, list[tuple[str, int]]]]:
        """Yields each linear layer with the names of those that it is made of, and their numbers of outputs."""
        heads, kv_heads, size = self.heads.heads, self.heads.kv_heads, self.heads.size
        for attribute, names in self._names.items():
            linear = _inner(getattr(self, attribute))
            outputs = [linear.out_features // len(names)] * len(names)
            if attribute == "qkv" and len(names) > 1:
                outputs = [heads * size, kv_heads * size, kv_heads * size]
            yield linear, list(zip(names, outputs, strict=True))

    def norm_kernel(self, name: str) -> Any:
        """Returns a norm in the form that `torch.classes.oatmill.Decoder` takes; None where there is none."""
        norm = dict(self.norms.items()).get(name)
        return norm.kernel() if isinstance(norm, Norm) else None

    def _attend(self, x: Tensor, cache: PagedCache, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        metadata, rope = cache.metadata, self.spec.rope
        assert metadata is not None
        heads, kv_heads = self.heads.heads, self.heads.kv_heads
        joined = self.qkv(x).view(len(x), heads + 2 * kv_heads, self.heads.size)
        query, key, value = joined.split_with_sizes((heads, kv_heads, kv_heads), 1)
        query, key = self._normed("query_norm", query), self._normed("key_norm", key)
        if rotation is None or rope is None:
            cache.backend.write(self.index, key, value, metadata)
        else:
            given, kind = rotation, self.model.ropes[rope].table
            rotation = metadata.made(("rotation", rope), lambda: repeated(given, kind, x.dtype))
            query = cache.backend.rotate_and_write(
                self.index, query, key, value, rotation, metadata, interleaved=self.model.interleaved
            )
        return cache.backend.attend(self.index, query, metadata, self.variant).flatten(1)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        if name not in self.norms:
            return x
        norm = self.norms[name]
        assert isinstance(norm, Norm)
        if x.dim() == 3 and norm.size != x.shape[2]:  # of all heads together
            return norm(x.flatten(1)).view(x.shape)
        y: Tensor = norm(x)
        return y

    def _feed_forward(self, residual: Tensor, x: Tensor) -> Tensor:
        """Returns residual and what the feed-forward part makes of x; both [tokens, hidden_size]."""
        if self.mixture is None:
            assert self.up is not None
            assert self.down is not None
            return self._add_to(residual, self.down, self._widen(self.up, x), "fed_norm")
        output = self.mixture(x.unsqueeze(0))
        output = output[0] if isinstance(output, tuple) else output  # beside it, what the router says
        return residual + output[0]

    def _add_to(self, residual: Tensor, linear: PackedLinear | RowParallel, x: Tensor, norm: str) -> Tensor:
        """Returns residual and the linear layer's output for x, normalised and scaled where the spec says so."""
        scale = self.model.residual_scale
        if norm not in self.norms and scale == 1:
            return linear.add_to(residual, x)
        output = self._normed(norm, linear(x))
        return residual + (output if scale == 1 else output * scale)

    def _widen(self, up: PackedLinear, x: Tensor) -> Tensor:
        """Returns the input of the down projection. x: [tokens, hidden_size]."""
        if self.model.activation == "relu":
            return up(x, activation="relu")
        gelu = self.model.activation == "gelu"
        if on_gpu(x):
            from tgi_server.engine.kernels.triton import norm_and_gate

            return norm_and_gate.gate_mul(up(x), gelu=gelu)
        return torch.ops.oatmill.gate_mul(up(x), gelu)


def _linear_names(spec: LayerSpec) -> dict[str, tuple[str, ...]]:
    """Returns the names in `transformers` of what each linear layer is made of."""
    names = {"qkv": spec.qkv, "output": (spec.output,)}
    return names if spec.mixture else names | {"up": spec.up, "down": (spec.down,)}


def _norm_names(spec: LayerSpec) -> dict[str, str]:
    """Returns the names in `transformers` of the norms that there are, by those in the spec."""
    return {kind: name for kind in NORMS if (name := getattr(spec, kind)) is not None}


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


def linear_kernel(layer: nn.Module | None) -> Any:
    """Returns a linear layer in the form that `torch.classes.oatmill.Decoder` takes, or None if it cannot take it.

    A row-parallel one is as well; the kernel sums what all shards compute.
    """
    inner = _inner(layer)
    return inner.kernel() if isinstance(inner, PackedLinear) else None
