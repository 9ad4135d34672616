"""A decoder as its spec describes it, in plain torch: the reference for models with kernels.

It runs on any device, and computes models for which a device has no kernels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tgi_server.engine.backends.attention.base import (
    AttentionBackend,
)
from tgi_server.engine.backends.base import Keep, MakeLora, PassInput
from tgi_server.engine.backends.decoder import Decoder, DecoderLayer, Norm
from tgi_server.engine.backends.layer_parts import LayerParts, LayerPass
from tgi_server.engine.backends.lora import AdaptedLinear, AdapterRows
from tgi_server.engine.backends.recurrent import mix
from tgi_server.engine.backends.states import SequenceStates


class ReferenceModel(LayerParts):
    """Runs a decoder layer by layer."""

    name = "plain torch"

    def __init__(self, source: nn.Module, decoder: Decoder, attention: AttentionBackend) -> None:
        super().__init__(source, decoder, attention)
        self.states = SequenceStates() if decoder.spec.has_states else None
        self._tapped: frozenset[int] = frozenset()
        self._keep: Keep | None = None
        # rounded to the model's dtype
        self._embedding_scale = float(torch.tensor(self._spec.embedding_scale, dtype=attention.dtype))

    def forward(self, inputs: PassInput) -> Tensor:
        decoder, taps, images = self.decoder, [], inputs.images
        hidden = self._embedded(inputs)
        turns = inputs.positions if inputs.rotary is None else inputs.rotary
        rotations = [self._turns(number, hidden, turns) for number in range(len(decoder.ropes))]
        further = self._further_inputs(inputs, hidden)
        step = LayerPass(inputs.positions, rotations, inputs.metadata, inputs.adapters, further)
        streams = self._streams(hidden, step.rows)
        for layer in decoder.layers:
            if layer.index in self._tapped:
                taps.append(hidden.clone())  # to which the layer may add in place
            if streams is None:
                hidden = self._layer(layer, hidden, step)
            else:
                streams = self._layer_of_streams(layer, streams, step)
                hidden = streams[0]
            if images is not None and layer.index < len(images.added):
                hidden = hidden.index_add(0, images.rows, images.added[layer.index])
        if streams is not None:
            hidden = self._merged(streams, step.rows)
        if len(decoder.layers) in self._tapped:
            taps.append(hidden.clone())
        if inputs.wanted is not None:
            hidden = hidden[inputs.wanted]
        hidden = self._normed(decoder.norm, hidden)
        if self._keep is not None:
            self._keep([hidden, *taps])
        return self._logits(hidden, step.rows)

    def tap(self, layers: Sequence[int], keep: Keep) -> None:
        self._tapped, self._keep = frozenset(layers), keep

    def adapt(self, lora: MakeLora) -> list[AdaptedLinear]:
        self.adapted = True
        adapted = []
        for layer, parts in self.decoder.adaptable():
            layer.lora = AdaptedLinear(parts, layer.in_features, lora(layer.out_features, len(parts)))
            adapted.append(layer.lora)
        return adapted

    def rounding_modules(self) -> list[nn.Module]:
        return [layer for layer, _ in self.decoder.adaptable()]

    def _embedded(self, inputs: PassInput) -> Tensor:
        hidden: Tensor = self.decoder.embedding(inputs.tokens)
        if self._embedding_scale != 1:
            hidden = hidden * self._embedding_scale
        if inputs.images is not None:
            hidden = hidden.index_copy(0, inputs.images.rows, inputs.images.embeddings)
        if self.decoder.positions is not None:
            hidden = hidden + self.decoder.positions[inputs.positions]
        return self._normed(self.decoder.embedding_norm, hidden)

    def _layer(self, layer: DecoderLayer, residual: Tensor, step: LayerPass) -> Tensor:
        """Returns the layer's output; it and residual are [tokens, hidden_size]."""
        spec, norms = self._spec, layer.norms
        attended = mixed = None
        normed = self._normed(norms.get("attention_norm"), residual)
        if layer.spec.normed_residual:
            residual = normed
        if "token_norm" in norms:
            assert step.further is not None
            normed = torch.cat([self._normed(norms["token_norm"], step.further[:, layer.index]), normed], 1)
        if layer.heads is not None:
            attended = self._attend(layer, normed, step)
        if layer.mixer is not None:
            assert self.states is not None
            projected = self._projected(layer, "mixer_in", normed, step.rows)
            mixed = mix(layer.mixer, projected, step.metadata, self.states, step.rows)
        laurel = self._laurel(layer.altup, normed, step.rows) if layer.altup else None
        if spec.parallel and "feed_forward_norm" in norms:
            normed = self._normed(norms["feed_forward_norm"], residual)
        if attended is not None:
            residual = self._added(layer, residual, "output", attended, norms.get("attended_norm"), step.rows)
        if laurel is not None:
            residual = (residual + laurel) / 2**0.5
        if mixed is not None:
            residual = self._added(layer, residual, "mixer_out", mixed, norms.get("attended_norm"), step.rows)
        if "up" in layer.linears or layer.mixture is not None:
            if not spec.parallel:
                normed = self._normed(norms.get("feed_forward_norm"), residual)
            residual = self._fed(layer, normed, residual, step.rows)
        if "input_gate" in layer.linears and layer.altup is None:
            residual = self._sum(residual, self._of_input(layer, residual, step), norms.get("input_norm"))
        return residual if layer.scale == 1 else residual * layer.scale

    def _fed(self, layer: DecoderLayer, x: Tensor, residual: Tensor, rows: AdapterRows | None) -> Tensor:
        """Returns the residual with the feed-forward part's output for x."""
        fed_norm = layer.norms.get("fed_norm")
        if layer.mixture is not None:
            return self._sum(residual, self._mixed(layer, x, residual, rows), fed_norm)
        return self._added(layer, residual, "down", self._widened(layer, x, rows), fed_norm, rows)

    def _attend(self, layer: DecoderLayer, x: Tensor, step: LayerPass) -> Tensor:
        """Returns the input of the layer's output projection, [tokens, heads * value_size]."""
        if layer.latents is not None:
            return self._attend_to_latents(layer, x, self.variants[layer.index], step)
        return self._attended(layer, self._projected(layer, "qkv", x, step.rows), step)

    def _attended(self, layer: DecoderLayer, joined: Tensor, step: LayerPass) -> Tensor:
        """Does what `_attend` does. joined: queries, keys and values, [tokens, outputs of "qkv"]."""
        made, spec, variant, norms = layer.heads, layer.spec, self.variants[layer.index], layer.norms
        assert made is not None
        tokens, heads, kv_heads, size = len(joined), made.heads, made.kv_heads, made.size
        if clip := spec.clip:
            joined = joined.clamp(-clip, clip)
        query: Any
        key: Any
        value: Any
        gate = None
        if spec.grouped:
            groups = joined.view(tokens, kv_heads, heads // kv_heads + 2, size)
            query, key, value = groups[:, :, :-2].reshape(tokens, heads, size), groups[:, :, -2], groups[:, :, -1]
        else:
            queries = heads * (2 if spec.gated else 1)
            parts = joined.split((queries * size, kv_heads * size, kv_heads * made.value_size), 1)
            query, key, value = (
                each.view(tokens, -1, width) if each.shape[1] else None
                for each, width in zip(parts, (size, size, made.value_size), strict=True)
            )
        if spec.gated:
            query, gate = query.unflatten(1, (heads, 2)).unbind(2)
        query = self._normed(norms.get("query_norm"), query)
        if spec.tuning is not None:
            query = _tuned(query, step.positions, *spec.tuning)
        if key is None:
            attended = self.attention.attend(layer.index, self._turned(query, spec.rope, step), step.metadata, variant)
        else:
            key, value = self._normed(norms.get("key_norm"), key), self._normed(norms.get("value_norm"), value)
            value = pad(value, (0, size - made.value_size)) if made.value_size < size else value
            turns = None if spec.rope is None else step.rotations[spec.rope]
            attended = self.attention.write_and_attend(
                layer.index, query, key, value, turns, step.metadata, variant, interleaved=self._spec.interleaved
            )
        if spec.value_scale != 1:
            attended = attended * spec.value_scale
        if gate is not None:
            attended = attended * gate.sigmoid()
        if made.value_size < size:
            attended = attended[..., : made.value_size]
        return attended.flatten(1)

    def _added(
        self, layer: DecoderLayer, residual: Tensor, name: str, x: Tensor, norm: Norm | None, rows: AdapterRows | None
    ) -> Tensor:
        """Returns residual and the linear layer's output for x, normalised and scaled where the spec says so."""
        if norm is None and self._spec.residual_scale == 1 and name not in layer.scales:
            added: Tensor = layer.linears[name].adapted(x, rows, residual=residual)
            return added
        return self._sum(residual, self._projected(layer, name, x, rows), norm)

    def _sum(self, residual: Tensor, output: Tensor, norm: Norm | None) -> Tensor:
        """Returns residual and a part's output, normalised and scaled where the spec says so."""
        output, scale = self._normed(norm, output), self._spec.residual_scale
        return residual + (output if scale == 1 else output * scale)

    def _logits(self, hidden: Tensor, rows: AdapterRows | None) -> Tensor:
        logits = self.decoder.head.adapted(hidden, rows)
        if self._spec.logits_divisor != 1:
            logits = logits / self._spec.logits_divisor
        if cap := self._spec.logits_softcap:
            logits = torch.tanh(logits / cap) * cap
        return logits


def _tuned(query: Tensor, positions: Tensor, floor: float, scale: float) -> Tensor:
    """Returns query, [tokens, heads, size], scaled by its positions (Nakanishi 2025)."""
    factors = torch.log1p(torch.floor((positions.float() + 1) / floor)) * scale + 1
    return (query * factors[:, None, None]).to(query.dtype)
