"""The weights of a decoder by its spec, arranged for a device, for the models of the backends."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from tgi_server.engine import proofs
from tgi_server.engine.backends.attention.base import AttentionVariant, KVShape, Latents
from tgi_server.engine.backends.mixer_kernels import MixerKernel
from tgi_server.engine.backends.rope import RotaryTable
from tgi_server.engine.checkpoint.quantized import QuantizedEmbedding
from tgi_server.engine.linear import PackedLinear
from tgi_server.engine.models.spec import DecoderSpec, LayerInputs, LayerSpec
from tgi_server.engine.parallel.layers import (
    RowParallel,
    ShardedQueryNorm,
    VocabParallelEmbedding,
    VocabParallelHead,
)


class Unfit(Exception):
    """Raised if a model differs from its spec, or has linear layers without a kernel."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm (Zhang and Sennrich 2019), or, if `centred`, a layer norm (Ba et al. 2016).

    weight: [size], in the dtype of the input, or for an RMS norm in float32: then the result is rounded once, after the
    product with the weight. A layer norm may have weights for each head, [heads, size]. bias: [size] or
    None, of a layer norm. eps: added under the root. sharded: sums the squares over all shards; None: this one has all.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool
    sharded: ShardedQueryNorm | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, norm: Any, size: int = 1, device: torch.device | None = None) -> Self:
        """Returns a norm with the weights of a norm of `transformers` or torch, or of one that sums over shards.

        size, device: size and device of its input, if it has no weights. Its formula is determined by computing a few
        numbers: norms differ in the offset of their weights, and in rounding. Raises Unfit for an unknown formula.
        """
        sharded = norm if isinstance(norm, ShardedQueryNorm) else None
        norm = norm if sharded is None else norm.inner
        eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        if weight is None:
            weight = torch.ones(size, device=device)
        kinds = [cls(weight, bias, eps, True), cls(1.0 + weight, bias, eps, True)]
        if bias is None:
            wide = weight.float()
            once = [cls(each, None, eps, False, sharded) for each in (wide, 1.0 + wide)]
            kinds = once if sharded else [cls(weight, None, eps, False), *once, *kinds]
        x = torch.randn(3, *weight.shape, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
        expected = norm(x)
        errors = [proofs.relative_error(kind(x), expected) for kind in kinds]
        if min(errors) > proofs.TOLERANCES["norm"][weight.dtype]:
            raise Unfit(f"the formula of {type(norm).__name__} is not known")
        return kinds[errors.index(min(errors))]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the normalised x, [..., size], in plain torch. A sharded norm is computed from this shard alone."""
        weight, values = self.weight.float(), x.float()
        if self.centred:
            values = layer_norm(values, x.shape[-1:], None, None, self.eps) * weight
            return (values if self.bias is None else values + self.bias.float()).to(x.dtype)
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight.dtype == x.dtype:
            values = values.to(x.dtype).float()
        return (values * weight).to(x.dtype)

    @property
    def size(self) -> int:
        """The number of elements that are normalised together."""
        return int(self.weight.shape[-1])


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The numbers of query heads (`heads`) and of key and value heads (`kv_heads`), and the elements of a head.

    value_size: elements of a value and of a head's output. In the cache, zeros follow them.
    """

    heads: int
    kv_heads: int
    size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class LatentLayers:
    """The parts of a layer with latents between its first and last projection; heads are the shard's.

    rotated: elements of a head that are rotated. keys: projects the other elements of a head's query to latents.
    values: projects the mean of latents to a head's output. index: elements of a key of the index, which is cached
    after the rotated ones; 0: there is no index.
    """

    rotated: int
    keys: Sequence[PackedLinear]
    values: Sequence[PackedLinear]
    index: int = 0

    def weights(self) -> Latents:
        """Returns the weights of keys and values, for attention that computes these itself."""
        keys, values = (
            torch.stack([layer.unpacked().weight.detach().T for layer in layers]) for layers in (self.keys, self.values)
        )
        return Latents(keys, values)


@dataclass(frozen=True, slots=True)
class AltUpLayer:
    """The weights of a layer for several streams of hidden states (Gemma 3n).

    linears: linear layers by their paths in the layer of `transformers`, in the order of `torch.classes.oatmill.AltUp`:
    the router, coefficients of predictions and of corrections, and two for the residual in parallel to attention, whose
    norm is laurel_norm. norm: norm of the router's input. scale: scale of the first stream, [hidden_size] float32;
    None: it is not scaled.
    """

    linears: dict[str, PackedLinear]
    norm: Norm
    laurel_norm: Norm
    scale: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A layer, with the query, key and value projections joined into one, and gate and up projection.

    index: index of the layer. linears: the existing linear layers by name: "qkv", "query" (of latents), "output",
    "index_query", "index_key", "index_weights" of attention; "mixer_in" and "mixer_out" of recurrent states; "up" and
    "down" of the feed-forward part or of the shared expert, whose gate is "shared_gate"; "input_gate" and
    "input_projection" of the further input. parts: the modules of `transformers` in each of these, with their numbers
    of outputs. scales: factors of the outputs of linear layers, [outputs] float32, if they are not 1. norms: the
    existing norms, by their names in LayerSpec. heads, variant: heads and variant of attention; None: the layer does
    not attend. latents: projections of latents; None: it attends to keys and values. mixer: kernel of the recurrent
    states; None: it has none. mixture: a module of `transformers` whose experts may be packed; None: there is none.
    scale: factor of the layer's output. altup: weights for several streams; None: there is one stream.
    """

    spec: LayerSpec
    index: int
    linears: dict[str, Any]
    parts: dict[str, list[tuple[str, int]]]
    scales: dict[str, Tensor]
    norms: dict[str, Norm]
    heads: AttentionHeads | None = None
    variant: AttentionVariant | None = None
    latents: LatentLayers | None = None
    mixer: MixerKernel | None = None
    mixture: Any = None
    scale: float = 1.0
    altup: AltUpLayer | None = None

    def adaptable(self) -> Iterator[tuple[PackedLinear, list[tuple[str, int]]]]:
        """Yields each linear layer with the names of its parts, and their numbers of outputs."""
        for name, parts in self.parts.items():
            yield inner(self.linears[name]), parts
        if self.spec.mixture is not None:
            router = operator.attrgetter(self.spec.mixture.router)(self.mixture)
            if isinstance(router, PackedLinear):
                yield router, [(self.spec.mixture.router, router.out_features)]
        if self.mixer is not None and self.spec.mixer is not None:
            for name, linear in self.mixer.inner.items():
                yield linear, [(f"{self.spec.mixer.name}.{name}", linear.out_features)]
        if self.altup is not None:
            for name, linear in self.altup.linears.items():
                yield linear, [(name, linear.out_features)]


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """Makes the further inputs of all layers."""

    spec: LayerInputs
    embedding: nn.Embedding | QuantizedEmbedding | VocabParallelEmbedding
    projection: PackedLinear
    norm: Norm


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model. layers_path, head_path: names of the list of layers and of the head in `transformers`.

    positions: learned positions, [positions, hidden_size]; None: there are none. embedding_norm: norm of the sum of
    embeddings and positions; None: there is none. ropes: rotary tables, see `DecoderSpec`. norm: norm after the layers;
    None: there is none. inputs: further inputs of layers; None: there are none. streams: the projections to further
    streams of hidden states, and back; None: there are none. others: linear layers outside of layers, by their paths in
    `transformers`.
    """

    spec: DecoderSpec
    embedding: nn.Embedding | QuantizedEmbedding | VocabParallelEmbedding
    positions: Tensor | None
    embedding_norm: Norm | None
    ropes: Sequence[RotaryTable]
    layers: Sequence[DecoderLayer]
    norm: Norm | None
    head: PackedLinear | VocabParallelHead
    layers_path: str
    head_path: str
    inputs: DecoderInputs | None = None
    streams: tuple[Sequence[PackedLinear], Sequence[PackedLinear]] | None = None
    others: Mapping[str, PackedLinear] = field(default_factory=dict)

    @property
    def embedding_weight(self) -> Tensor:
        """The embeddings of all tokens, or of this shard's, [tokens, hidden_size]; empty if they are quantized."""
        weight: Tensor = self.embedding.weight
        return weight

    @property
    def kv_shape(self) -> KVShape:
        """The layout of a token in the cache, up to the last layer that attends; for latents see `Latents`."""
        attending = {layer.index: layer for layer in self.layers if layer.heads is not None}
        heads, sizes = [0] * (1 + max(attending, default=-1)), [0] * (1 + max(attending, default=-1))
        value_dim = None
        for index, layer in attending.items():
            assert layer.heads is not None
            heads[index], sizes[index] = layer.heads.kv_heads, layer.heads.size if layer.heads.kv_heads else 0
            if layer.latents is not None:
                value_dim = max(value_dim or 0, layer.latents.rotated + layer.latents.index)
                sizes[index] -= layer.latents.rotated
        alike = len({size for size in sizes if size}) == 1
        return KVShape(tuple(heads), max(sizes), None if alike else tuple(sizes), value_dim)

    def adaptable(self) -> Iterator[tuple[PackedLinear, list[tuple[str, int]]]]:
        """Yields each linear layer with the paths of its parts, and their numbers of outputs."""
        for layer in self.layers:
            for linear, parts in layer.adaptable():
                yield linear, [(f"{self.layers_path}.{layer.index}.{name}", outputs) for name, outputs in parts]
        for path, linear in self.others.items():
            yield linear, [(path, linear.out_features)]
        head = inner(self.head)
        yield head, [(self.head_path, head.out_features)]


def inner(module: Any) -> Any:
    """Returns the layer inside a parallel one, which combines the shards' results, or else the module itself."""
    return module.inner if isinstance(module, RowParallel | VocabParallelHead) else module
