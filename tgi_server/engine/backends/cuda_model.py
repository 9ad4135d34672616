"""Models of specs on GPUs: a few kernels in Triton and products of cuBLAS for each layer, captured as CUDA graphs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine import proofs
from tgi_server.engine.backends.attention.base import AttentionBackend, AttentionVariant
from tgi_server.engine.backends.attention.cuda_latents import LatentAttention
from tgi_server.engine.backends.cuda_parts import (
    MixtureKernels,
    fault_of_latents,
    fault_of_router,
    fault_of_routing,
    latent_norms,
    route,
    router_logits,
    use_activation,
)
from tgi_server.engine.backends.decoder import Decoder, DecoderLayer, Norm, inner
from tgi_server.engine.backends.layer_parts import LayerPass, router_of
from tgi_server.engine.backends.lora import AdapterRows
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.backends.rope import RotaryTable
from tgi_server.engine.kernels.triton import norm_and_gate, rope_and_cache, routing, variants
from tgi_server.engine.linear.few_rows import norm_of_inputs
from tgi_server.engine.linear.grouped_experts import Grouped
from tgi_server.engine.parallel.layers import RowParallel

# The norms of a layer that most have.
_TWO = ("attention_norm", "feed_forward_norm")


@dataclass(frozen=True, slots=True)
class FewRows:
    """The products of a layer that are fused with its norms. most: maximum rows. attention, feed_forward: the norms."""

    most: int
    attention: Any
    feed_forward: Any


class CudaModel(ReferenceModel):
    """Runs a decoder layer by layer. The host never reads a result in between, so any step can be captured."""

    name = "fused layers"
    _routes = False

    def __init__(self, source: nn.Module, decoder: Decoder, attention: AttentionBackend) -> None:
        super().__init__(source, decoder, attention)
        plain = [layer for layer in decoder.layers if _of_two_norms(layer, parallel=self._spec.parallel)]
        self._few_rows = {layer.index: few for layer in plain if (few := _few_rows(layer)) is not None}
        self._rounds = {layer.index for layer in plain if _rounds(layer)}
        self._scalings = [_scaling(rope, attention.device, attention.dtype) for rope in decoder.ropes]
        self.fallbacks: list[str] = []
        self._mixtures = self._proved_mixtures()
        self._latent_norms = self._proved_latents()

    def _proved_mixtures(self) -> dict[int, MixtureKernels]:
        """Returns the kernels of mixtures by layer, for those layers whose routing kernels are right."""
        device, dtype = self.attention.device, self.attention.dtype
        mixed = [layer for layer in self.decoder.layers if layer.mixture is not None]
        if not mixed:
            return {}
        self._routes = self._right("experts are chosen", fault_of_routing(mixed[0], dtype, device))
        if not self._routes:
            return {}
        in_16_bits = fault_of_router(mixed[0], dtype, device) is None
        found = {layer.index: MixtureKernels.of(layer, in_16_bits=in_16_bits) for layer in mixed}
        for kernels in found.values():
            if kernels is not None and isinstance(kernels.experts, Grouped):
                use_activation(kernels.experts, self._spec.activation, dtype, device)
        return {index: kernels for index, kernels in found.items() if kernels is not None}

    def _proved_latents(self) -> dict[int, tuple[Any, Any]]:
        """Returns the norms of layers with latents by layer, for those layers whose kernel is right."""
        norms = {layer.index: norms for layer in self.decoder.layers if (norms := latent_norms(layer)) is not None}
        if not norms or not isinstance(self.attention, LatentAttention):
            return {}
        first = next(layer for layer in self.decoder.layers if layer.index in norms)
        given = norms[first.index], first, self.attention.dtype, self.attention.device
        fault = fault_of_latents(*given, interleaved=self._spec.interleaved)
        return norms if self._right("latents are written", fault) else {}

    def _right(self, what: str, fault: str | None) -> bool:
        if fault is not None:
            self.fallbacks.append(f"{what} in plain torch, which is slower: {fault}")
        return fault is None

    def _turns(self, number: int, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        scaling, frequencies = self._scalings[number], self.decoder.ropes[number].frequencies()
        if scaling is None or frequencies is None or positions.dim() != 1:
            return super()._turns(number, like, positions)
        return rope_and_cache.turns(positions, frequencies.to(like.device), scaling, like.dtype)

    def _turned(self, x: Tensor, rope: int | None, step: LayerPass, *, interleaved: bool | None = None) -> Tensor:
        if rope is None or "rotary" not in variants():
            return super()._turned(x, rope, step, interleaved=interleaved)
        cosine, sine = (table[0].contiguous() for table in step.rotations[rope])
        pairs = self._spec.interleaved if interleaved is None else interleaved
        return rope_and_cache.turn(x, cosine, sine, interleaved=pairs)

    def _layer(self, layer: DecoderLayer, residual: Tensor, step: LayerPass) -> Tensor:
        few = self._few_rows.get(layer.index)
        if few is None or step.rows is not None or not 0 < len(residual) <= few.most:
            if step.rows is None and layer.index in self._rounds:
                return self._layer_of_rounded(layer, residual, step)
            return super()._layer(layer, residual, step)
        linears, norms, spec = layer.linears, layer.norms, self._spec
        joined = linears["qkv"].fused(residual, norm=few.attention)
        attended = self._attended(layer, joined, step)
        residual = self._added(layer, residual, "output", attended, norms.get("attended_norm"), None)
        widened = linears["up"].fused(residual, norm=few.feed_forward, activation=spec.activation, gated=spec.gated_mlp)
        residual = self._added(layer, residual, "down", widened, norms.get("fed_norm"), None)
        return residual if layer.scale == 1 else residual * layer.scale

    def _layer_of_rounded(self, layer: DecoderLayer, residual: Tensor, step: LayerPass) -> Tensor:
        """Does what `_layer` does, with inputs of products rounded where they are normalised or activated."""
        linears, norms, spec = layer.linears, layer.norms, self._spec
        first, second = (norms[name] for name in _TWO)
        joined, _ = linears["qkv"].of_norm(residual, None, first.weight, first.bias, first.eps)
        attended = self._projected(layer, "output", self._attended(layer, joined, step), None)
        added: Tensor | None = attended
        if (norm := norms.get("attended_norm")) is not None or spec.residual_scale != 1:
            residual, added = self._sum(residual, attended, norm), None
        up, residual = linears["up"].of_norm(residual, added, second.weight, second.bias, second.eps)
        down = inner(linears["down"])
        fed = down.of_activated(up, spec.activation, gated=spec.gated_mlp)
        if isinstance(parallel := linears["down"], RowParallel):
            fed = parallel.group.all_reduce(fed.contiguous())
        residual = self._sum(residual, fed, norms.get("fed_norm"))
        return residual if layer.scale == 1 else residual * layer.scale

    def _attend_to_latents(self, layer: DecoderLayer, x: Tensor, variant: AttentionVariant, step: LayerPass) -> Tensor:
        norms, attention, latents = self._latent_norms.get(layer.index), self.attention, layer.latents
        if norms is None or latents is None or not isinstance(attention, LatentAttention):
            return super()._attend_to_latents(layer, x, variant, step)
        spec, interleaved = layer.spec, self._spec.interleaved
        joined = self._projected(layer, "qkv", x, step.rows)
        rotation = None
        if spec.rope is not None:
            cosine, sine = (table[0].contiguous() for table in step.rotations[spec.rope])
            rotation = cosine, sine
        query = attention.write_joined(layer.index, joined, *norms, rotation, step.metadata, interleaved=interleaved)
        if "query" in layer.linears:
            query = self._projected(layer, "query", query, step.rows)
        else:
            query = joined[:, : joined.shape[1] - latents.keys[0].out_features - latents.rotated]
        query = query.view(len(query), len(latents.keys), -1)
        if not step.metadata.chunks:
            attended = attention.attend_turning(
                layer.index, query, rotation, step.metadata, variant, interleaved=interleaved
            )
            return attended.flatten(1)
        plain, of_positions = query.split((latents.keys[0].in_features, latents.rotated), 2)
        query = torch.cat([plain, self._turned(of_positions, spec.rope, step)], 2)
        return attention.attend(layer.index, query, step.metadata, variant).flatten(1)

    def _chosen(self, layer: DecoderLayer, x: Tensor, rows: AdapterRows | None) -> tuple[Tensor, Tensor]:
        if not self._routes:
            return super()._chosen(layer, x, rows)
        return route(layer, self._router_logits(layer, x, rows), x.dtype)

    def _router_logits(self, layer: DecoderLayer, x: Tensor, rows: AdapterRows | None) -> Tensor:
        kernels, spec, router = self._mixtures.get(layer.index), layer.spec.mixture, router_of(layer)
        if kernels is None or spec is None or not kernels.in_16_bits or not spec.wide:
            return super()._router_logits(layer, x, rows)
        logits, bias = router_logits(router, x), getattr(router, "bias", None)
        return logits if bias is None else logits + bias

    def _fed(self, layer: DecoderLayer, x: Tensor, residual: Tensor, rows: AdapterRows | None) -> Tensor:
        kernels = self._mixtures.get(layer.index)
        if kernels is None:
            return super()._fed(layer, x, residual, rows)
        chosen, shares = self._chosen(layer, x, rows)
        if isinstance(kernels.experts, Grouped):
            outputs = kernels.experts.outputs(x, chosen, shares)
        else:
            outputs = kernels.experts(x, chosen, shares).unsqueeze(1)
        shared = opened = None
        if kernels.down is not None:
            shared = self._scaled(layer, "down", kernels.down.adapted(self._widened(layer, x, rows), rows))
            gate = layer.linears.get("shared_gate")
            opened = None if gate is None else gate.adapted(x, rows)
        fed_norm, group = layer.norms.get("fed_norm"), kernels.group
        if group is None and fed_norm is None and self._spec.residual_scale == 1:
            return routing.summed(outputs, shared, opened, residual)
        total = outputs[:, 0] if outputs.shape[1] == 1 and shared is None else None
        total = routing.summed(outputs, shared, opened, None) if total is None else total
        return self._sum(residual, total if group is None else group.all_reduce(total.contiguous()), fed_norm)

    def _sum(self, residual: Tensor, output: Tensor, norm: Norm | None) -> Tensor:
        scale = self._spec.residual_scale
        if norm is None:
            return residual + output if scale == 1 else torch.add(residual, output, alpha=scale)
        if norm.sharded is not None or norm.weight.dim() != 1 or output.dim() != 2:
            return super()._sum(residual, output, norm)
        return self._norm(norm, output, residual, scale)

    def _norm(self, norm: Norm, x: Tensor, residual: Tensor | None = None, factor: float = 1.0) -> Tensor:
        """Returns the normalised x, or residual + factor * that."""
        if not norm.centred:
            return norm_and_gate.rms_norm(x, norm.weight, norm.eps, residual, factor)
        if norm.bias is not None and norm.weight.dim() == 1:
            return norm_and_gate.layer_norm(x, norm.weight, norm.bias, norm.eps, residual, factor)
        return norm(x) if residual is None else residual + norm(x) * factor

    def _activated(self, up: Tensor) -> Tensor:
        return norm_and_gate.activate(up, self._spec.activation, gated=self._spec.gated_mlp)


def _scaling(rope: RotaryTable, device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the factor of a rope's cosines and sines; None if the kernel's results differ from the rope's."""
    frequencies = rope.frequencies()
    if "rotary" not in variants() or frequencies is None or frequencies.dtype is not torch.float32:
        return None
    positions = torch.tensor([0, 1, 77, 4001, 99_999], device=device)
    known = rope.at(torch.empty(0, dtype=dtype, device=device), positions)
    scaling = float(known[0].flatten()[0])

    def cases() -> Iterator[proofs.Case]:
        found = rope_and_cache.turns(positions, frequencies.to(device), scaling, dtype)
        yield from (("of rotary positions", *each) for each in zip(found, known, strict=True))

    return scaling if proofs.fault_of("the kernel", cases) is None else None


def _of_two_norms(layer: DecoderLayer, *, parallel: bool) -> bool:
    """Returns True for a layer of attention and then a dense feed-forward part, with an unsharded norm before each.

    Norms after them are allowed. Latents, mixers, mixtures and other further parts are not.
    """
    linears, norms, spec = layer.linears, layer.norms, layer.spec
    more = (layer.latents, layer.mixer, layer.mixture, layer.altup, spec.deviations, norms.get("token_norm"))
    others = parallel or spec.normed_residual or layer.heads is None or {"qkv", "up"} & layer.scales.keys()
    if others or not {"qkv", "up"} <= linears.keys() or "input_gate" in linears:
        return False
    if any(each is not None for each in more):
        return False
    return all(norm is not None and norm.sharded is None and norm.weight.dim() == 1 for norm in map(norms.get, _TWO))


def _rounds(layer: DecoderLayer) -> bool:
    """Returns True if the products of a layer, one of `_of_two_norms`, round their inputs inside norms and the gate."""
    kinds = [inner(layer.linears[name]) for name in ("qkv", "up", "down")]
    centred = [norm.centred for norm in map(layer.norms.__getitem__, _TWO)]
    biased = [norm.bias is not None for norm in map(layer.norms.__getitem__, _TWO)]
    return all(kind.rounds_inputs for kind in kinds) and centred == biased and not {"down"} & layer.scales.keys()


def _few_rows(layer: DecoderLayer) -> FewRows | None:
    """Returns the fused products for few rows of a layer, one of `_of_two_norms`; None if it has none."""
    linears, norms = layer.linears, layer.norms
    most = min(linears[name].few_rows for name in ("qkv", "up"))
    if not most:
        return None
    made = [
        norm_of_inputs(
            linears[linear], norms[name].weight, norms[name].bias, norms[name].eps, centred=norms[name].centred
        )
        for linear, name in zip(("qkv", "up"), _TWO, strict=True)
    ]
    return FewRows(most, *made)
