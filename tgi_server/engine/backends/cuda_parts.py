"""The kernels of parts that only some families have, mixtures and latents, each proved when a model is loaded."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tgi_server.engine import proofs
from tgi_server.engine.backends.attention.base import rotate, rotate_pairs
from tgi_server.engine.backends.decoder import DecoderLayer, Norm
from tgi_server.engine.backends.layer_parts import routed, router_of
from tgi_server.engine.kernels.triton import norm_and_gate, routing
from tgi_server.engine.kernels.triton.latents import LatentNorm, write_latents
from tgi_server.engine.linear import PackedLinear
from tgi_server.engine.linear.grouped_experts import Grouped
from tgi_server.engine.memory import HOST
from tgi_server.engine.models.spec import Activation
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.parallel.layers import RowParallel

# Tokens of proofs.
_TOKENS = 5


@dataclass(frozen=True, slots=True)
class MixtureKernels:
    """The parts of a layer's mixture that kernels compute.

    experts: the experts; `Grouped` ones have a method `outputs`. down: linear layer of the shared expert; None if there
    is no shared expert. group: shards whose results are summed; None for a single shard. in_16_bits: True if the router
    multiplies inputs and weights in 16 bits and sums in float32.
    """

    experts: Any
    down: Any
    group: ShardGroup | None
    in_16_bits: bool

    @classmethod
    def of(cls, layer: DecoderLayer, *, in_16_bits: bool) -> "MixtureKernels | None":
        """Returns how a layer computes its mixture; None for one with norms inside, or that shares its inputs."""
        spec, experts, down = layer.spec.mixture, getattr(layer.mixture, "experts", None), layer.linears.get("down")
        inside = {"router_norm", "mixture_norm", "mixed_norm", "shared_norm"} & layer.norms.keys()
        if spec is None or spec.share_inputs or inside:
            return None
        if not isinstance(experts, RowParallel):
            return None if isinstance(down, RowParallel) else cls(experts, down, None, in_16_bits)
        if down is None:
            return cls(experts.inner, None, experts.group, in_16_bits)
        return cls(experts.inner, down.inner, experts.group, in_16_bits) if isinstance(down, RowParallel) else None


def route(layer: DecoderLayer, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Computes `routed` with a kernel. dtype: the dtype of the returned shares."""
    spec, mixture = layer.spec.mixture, layer.mixture
    assert spec is not None
    bias, factors = (None if name is None else operator.attrgetter(name)(mixture) for name in (spec.bias, spec.factors))
    return routing.route(
        logits,
        bias,
        factors,
        dtype,
        chosen=spec.chosen or router_of(layer).top_k,
        sigmoid=spec.sigmoid,
        groups=spec.groups,
        chosen_groups=spec.chosen_groups,
        group_scores=spec.group_scores,
        normalised=spec.normalised,
        factor=spec.factor,
    )


def fault_of_routing(layer: DecoderLayer, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns why the kernels around the products of a layer's experts must not be used; None if they are right."""
    router = router_of(layer)
    experts = router.out_features if isinstance(router, PackedLinear) else len(router.weight)

    def cases() -> Iterator[proofs.Case]:
        logits = _random(device, torch.float32, _TOKENS, experts)
        (chosen, shares), known = route(layer, logits, dtype), routed(layer, logits)
        empty = torch.zeros_like(logits)
        yield "in shares", empty.scatter(1, chosen, shares.float()), empty.scatter(1, known[0], known[1])
        outputs, (shared, residual) = (_random(device, dtype, *shape) for shape in ((_TOKENS, 3, 64), (2, _TOKENS, 64)))
        yield "in sums", routing.summed(outputs, shared, None, residual), outputs.sum(1) + shared + residual

    return proofs.fault_of("the kernel of routing", cases)


def fault_of_router(layer: DecoderLayer, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns why the router must not multiply in 16 bits with sums in float32; None if that is right."""
    router: Any = router_of(layer)
    if device == HOST or dtype is torch.float32 or isinstance(router, PackedLinear) or router.weight.dtype != dtype:
        return "its inputs or weights are not of 16 bits"

    def cases() -> Iterator[proofs.Case]:
        x = _random(device, dtype, _TOKENS, router.weight.shape[1])
        yield "", router_logits(router, x), linear(x.float(), router.weight.float())

    return proofs.fault_of("the product of the router", cases)


def router_logits(router: Any, x: Tensor) -> Tensor:
    """Returns the product of x and a router's weight, without the bias, [tokens, experts] float32."""
    return torch.mm(x, router.weight.t(), out_dtype=torch.float32)


def use_activation(experts: Grouped, activation: Activation, dtype: torch.dtype, device: torch.device) -> None:
    """Makes experts compute their gate or activation by a kernel, if they have the activation of this name."""
    kernel = partial(norm_and_gate.activate, activation=activation, gated=experts.gated)

    def cases() -> Iterator[proofs.Case]:
        x = 3 * _random(device, dtype, _TOKENS, 64)
        yield "", kernel(x), experts.activate(x)

    if proofs.fault_of("the kernel of activations", cases) is None:
        experts.activate = kernel


def latent_norms(layer: DecoderLayer) -> tuple[LatentNorm | None, LatentNorm] | None:
    """Returns the norms of the queries and of the latents; None if the kernel does not support them."""
    queries, keys = layer.norms.get("query_norm"), layer.norms.get("key_norm")
    made = [None if norm is None else _latent_norm(norm) for norm in (queries, keys)]
    if layer.latents is None or layer.spec.index is not None or made[1] is None:
        return None
    if (made[0] is None) is ("query" in layer.linears):
        return None
    return made[0], made[1]


def _latent_norm(norm: Norm) -> LatentNorm | None:
    if norm.centred or norm.sharded is not None or norm.weight.dim() != 1:
        return None
    return LatentNorm(norm.weight, norm.eps)


def fault_of_latents(
    norms: tuple[LatentNorm | None, LatentNorm],
    layer: DecoderLayer,
    dtype: torch.dtype,
    device: torch.device,
    *,
    interleaved: bool,
) -> str | None:
    """Returns why the kernel that writes latents must not be used; None if its results are right."""
    latents, (of_queries, of_keys) = layer.latents, norms
    assert latents is not None
    rank, rotated = latents.keys[0].out_features, latents.rotated
    size = 8 if of_queries is None else len(of_queries.weight)

    def cases() -> Iterator[proofs.Case]:
        joined = _random(device, dtype, _TOKENS, size + rank + rotated)
        cached, beside = (torch.zeros(1, _TOKENS, 1, width, dtype=dtype, device=device) for width in (rank, rotated))
        slots = torch.arange(_TOKENS, device=device).flip(0)
        angles = _random(device, torch.float32, _TOKENS, rotated // 2).repeat(1, 2)
        rotation = angles.cos().to(dtype), angles.sin().to(dtype)
        given = joined, of_queries, of_keys, rotation, cached, beside, slots, rotated
        queries = write_latents(*given, interleaved=interleaved)
        query, latent, last = joined.split((size, rank, rotated), 1)
        turned = (rotate_pairs if interleaved else rotate)(last, *rotation)
        yield "of latents", cached[0, :, 0].flip(0), Norm(of_keys.weight, None, of_keys.eps, False)(latent)
        yield "of what is turned", beside[0, :, 0].flip(0), turned
        if of_queries is not None:
            yield "of queries", queries, Norm(of_queries.weight, None, of_queries.eps, False)(query)

    return proofs.fault_of("the kernel that writes latents", cases)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns numbers that are the same at every start."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
