"""Models of specs on GPUs: a few kernels in Triton and products of cuBLAS for each layer, captured as CUDA graphs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine import proofs
from tgi_server.engine.backends.attention.base import AttentionBackend
from tgi_server.engine.backends.decoder import Decoder, DecoderLayer, Norm
from tgi_server.engine.backends.layer_parts import LayerPass
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.backends.rope import RotaryTable
from tgi_server.engine.kernels.triton import norm_and_gate, rope_and_cache, variants
from tgi_server.engine.linear.few_rows import norm_of_inputs


@dataclass(frozen=True, slots=True)
class FewRows:
    """The two products of a layer that have its norms inside. most: rows. attention, feed_forward: their norms."""

    most: int
    attention: Any
    feed_forward: Any


class CudaModel(ReferenceModel):
    """Runs a decoder layer by layer. The host never reads a result in between, so any step can be captured."""

    name = "fused layers"

    def __init__(self, source: nn.Module, decoder: Decoder, attention: AttentionBackend) -> None:
        super().__init__(source, decoder, attention)
        made = {layer.index: _few_rows(layer, parallel=self._spec.parallel) for layer in decoder.layers}
        self._few_rows = {index: few for index, few in made.items() if few is not None}
        self._scalings = [_scaling(rope, attention.device, attention.dtype) for rope in decoder.ropes]

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
            return super()._layer(layer, residual, step)
        linears, norms, spec = layer.linears, layer.norms, self._spec
        joined = linears["qkv"].fused(residual, norm=few.attention)
        attended = self._attended(layer, joined, step)
        residual = self._added(layer, residual, "output", attended, norms.get("attended_norm"), None)
        widened = linears["up"].fused(residual, norm=few.feed_forward, activation=spec.activation, gated=spec.gated_mlp)
        residual = self._added(layer, residual, "down", widened, norms.get("fed_norm"), None)
        return residual if layer.scale == 1 else residual * layer.scale

    def _norm(self, norm: Norm, x: Tensor) -> Tensor:
        if not norm.centred:
            return norm_and_gate.rms_norm(x, norm.weight, norm.eps)
        if norm.bias is not None and norm.weight.dim() == 1:
            return norm_and_gate.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return norm(x)

    def _activated(self, up: Tensor) -> Tensor:
        return norm_and_gate.activate(up, self._spec.activation, gated=self._spec.gated_mlp)


def _scaling(rope: RotaryTable, device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns what a rope's cosines and sines are multiplied by; None if the kernel does not compute what it does."""
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


def _few_rows(layer: DecoderLayer, *, parallel: bool) -> FewRows | None:
    """Returns what a layer computes few rows with; None if it is more than a norm before attention and one before the
    feed-forward part, or has no such products.
    """
    linears, norms, spec = layer.linears, layer.norms, layer.spec
    own = [norms.get(name) for name in ("attention_norm", "feed_forward_norm")]
    most = min((linears[name].few_rows if name in linears else 0 for name in ("qkv", "up")), default=0)
    more = (layer.latents, layer.mixer, layer.mixture, layer.altup, spec.deviations, norms.get("token_norm"))
    others = parallel or spec.normed_residual or layer.heads is None or {"qkv", "up"} & layer.scales.keys()
    if not most or others or "input_gate" in linears or any(each is not None for each in more):
        return None
    if any(norm is None or norm.sharded is not None or norm.weight.dim() != 1 for norm in own):
        return None
    made = [
        norm_of_inputs(linears[name], norm.weight, norm.bias, norm.eps, centred=norm.centred)
        for name, norm in zip(("qkv", "up"), own, strict=True)
        if norm is not None
    ]
    return FewRows(most, *made)
