"""Parts of layers in plain torch: those of all layers, and those of few families (mixtures, latents, streams)."""

import operator
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from tgi_server.engine.backends.attention.base import (
    AttentionBackend,
    AttentionVariant,
    ForwardMetadata,
    Selection,
    rotate,
    rotate_pairs,
)
from tgi_server.engine.backends.base import PagedModel, PassInput
from tgi_server.engine.backends.decoder import AltUpLayer, Decoder, DecoderLayer, Norm
from tgi_server.engine.backends.lora import AdapterRows
from tgi_server.engine.checkpoint.quantized.experts import ACTIVATIONS
from tgi_server.engine.linear import PackedLinear
from tgi_server.engine.parallel.layers import RowParallel, VocabParallelHead

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LayerPass:
    """A forward pass as its layers see it: the positions of its tokens, their rotations, and the metadata.

    rotations: the rotation of each of the model's ropes. further: further inputs of the layers, [tokens, layers, size];
    None: there are none. selections: the tokens chosen by each index so far; layers use the last selection.
    """

    positions: Tensor
    rotations: Sequence[Rotation]
    metadata: ForwardMetadata
    rows: AdapterRows | None
    further: Tensor | None
    selections: list[Selection] = field(default_factory=list)


class LayerParts(PagedModel):
    """A model by its spec, without the order in which a layer computes its parts. variants: how layers attend."""

    def __init__(self, source: nn.Module, decoder: Decoder, attention: AttentionBackend) -> None:
        super().__init__(source, attention)
        self.decoder = decoder
        self._spec = decoder.spec
        self.variants = {layer.index: found for layer in decoder.layers if (found := _variant(layer)) is not None}

    @property
    def split_head(self) -> VocabParallelHead | None:
        head = self.decoder.head
        return head if isinstance(head, VocabParallelHead) else None

    @abstractmethod
    def _layer(self, layer: DecoderLayer, residual: Tensor, step: LayerPass) -> Tensor:
        """Returns the layer's output; it and residual are [tokens, hidden_size]."""

    def _further_inputs(self, inputs: PassInput, hidden: Tensor) -> Tensor | None:
        made = self.decoder.inputs
        if any(layer.token_norm for layer in self._spec.layers):
            embeddings: Tensor = self.decoder.embedding(inputs.tokens)
            return embeddings.unsqueeze(1).expand(-1, len(self._spec.layers), -1)
        if made is None:
            return None
        spec = made.spec
        projected = made.projection.adapted(hidden, inputs.adapters) * spec.projection_scale
        projected = self._normed(made.norm, projected.unflatten(1, (-1, made.norm.size)))
        known = inputs.tokens.masked_fill(inputs.tokens >= spec.tokens, 0)
        scale = float(torch.tensor(spec.embedding_scale, dtype=hidden.dtype))
        return (projected + (made.embedding(known) * scale).view(projected.shape)) * spec.scale

    def _mixed(self, layer: DecoderLayer, x: Tensor, residual: Tensor, rows: AdapterRows | None) -> Tensor:
        """Returns the output of a mixture of experts for x, [tokens, hidden_size], the shared expert's included."""
        norms, spec = layer.norms, layer.spec.mixture
        assert spec is not None
        of_router = self._normed(norms["router_norm"], residual) if "router_norm" in norms else x
        of_experts = self._normed(norms["mixture_norm"], residual) if "mixture_norm" in norms else x
        chosen, shares = self._chosen(layer, of_router, rows)
        shares = shares.to(x.dtype)
        experts, down, group = layer.mixture.experts, layer.linears.get("down"), None
        normed_apart = "mixed_norm" in norms or "shared_norm" in norms
        if isinstance(down, RowParallel) and isinstance(experts, RowParallel) and not normed_apart:
            experts, down, group = experts.inner, down.inner, down.group  # one sum over the shards, of both
        if spec.share_inputs:
            count = chosen.shape[1]
            of_experts = of_experts.repeat_interleave(count, 0) * shares.view(-1, 1)
            made = experts(of_experts, chosen.view(-1, 1), torch.ones_like(shares).view(-1, 1))
            output = made.unflatten(0, (-1, count)).sum(1)
        else:
            output = experts(of_experts, chosen, shares)
        output = self._normed(norms.get("mixed_norm"), output)
        if "up" not in layer.linears:
            return output
        assert down is not None
        shared = self._scaled(layer, "down", down.adapted(self._widened(layer, x, rows), rows))
        shared = self._normed(norms.get("shared_norm"), shared)
        gate = layer.linears.get("shared_gate")
        output = output + (shared if gate is None else gate.adapted(x, rows).sigmoid() * shared)
        return output if group is None else group.all_reduce(output.contiguous())

    def _chosen(self, layer: DecoderLayer, x: Tensor, rows: AdapterRows | None) -> tuple[Tensor, Tensor]:
        """Returns the experts of each token, and the factors of their outputs: [tokens, experts of a token] each."""
        return routed(layer, self._router_logits(layer, x, rows))

    def _router_logits(self, layer: DecoderLayer, x: Tensor, rows: AdapterRows | None) -> Tensor:
        """Returns the logits of a layer's router, [tokens, experts]."""
        assert layer.spec.mixture is not None
        router = router_of(layer)
        x = x.float() if layer.spec.mixture.wide else x
        if isinstance(router, PackedLinear):
            logits: Tensor = router.adapted(x, rows)
            return logits
        bias = getattr(router, "bias", None)
        return linear(x, router.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _attend_to_latents(self, layer: DecoderLayer, x: Tensor, variant: AttentionVariant, step: LayerPass) -> Tensor:
        """Returns the input of the output projection, [tokens, heads * value_size].

        The cache of a token, which all heads share, has a latent and the rotated elements.
        """
        latents, spec = layer.latents, layer.spec
        assert latents is not None
        rank = latents.keys[0].out_features
        joined = self._projected(layer, "qkv", x, step.rows)
        query, latent, turned = joined.split((joined.shape[1] - rank - latents.rotated, rank, latents.rotated), 1)
        if "query" in layer.linears:
            query = normed = self._normed(layer.norms.get("query_norm"), query)
            query = self._projected(layer, "query", query, step.rows)
        plain, of_positions = query.unflatten(1, (len(latents.keys), -1)).split(
            (latents.keys[0].in_features, latents.rotated), 2
        )
        latent = self._normed(layer.norms.get("key_norm"), latent)
        turned = self._turned(turned.unsqueeze(1), spec.rope, step)
        query = torch.cat([plain, self._turned(of_positions, spec.rope, step)], 2)
        if spec.index is not None:
            variant, index_key = self._select(layer, x, normed, variant, step)
            turned = torch.cat([turned, index_key], 2)
        self.attention.write(layer.index, latent.unsqueeze(1), turned, step.metadata)
        return self.attention.attend(layer.index, query, step.metadata, variant).flatten(1)

    def _select(
        self, layer: DecoderLayer, x: Tensor, queries: Tensor, variant: AttentionVariant, step: LayerPass
    ) -> tuple[AttentionVariant, Tensor]:
        """Returns how a layer attends to chosen tokens, and the keys of its index, [tokens, 1, size].

        queries: the input of the queries' projection. The keys of a layer without an index are zeros.
        """
        index, rope = layer.spec.index, layer.spec.rope
        assert index is not None
        if index.shared:
            last = step.selections[-1]
            return replace(variant, selection=last), last.query.new_zeros(len(x), 1, last.query.shape[2])
        of_weights = layer.linears["index_weights"].weight.dtype  # mostly more than the model's
        query = self._projected(layer, "index_query", queries, step.rows).unflatten(1, (index.heads, -1))
        key = self._normed(layer.norms["index_norm"], self._projected(layer, "index_key", x, step.rows)).unsqueeze(1)
        weights = self._projected(layer, "index_weights", x.to(of_weights), step.rows).float()
        weights = weights * (index.heads * query.shape[2]) ** -0.5
        query, key = (
            self._turned(x_of_index, rope, step, interleaved=index.interleaved) for x_of_index in (query, key)
        )
        step.selections.append(Selection(layer.index, query, weights))
        return replace(variant, selection=step.selections[-1]), key

    def _turns(self, number: int, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rotation of positions by the rope with this number, as `RotaryTable.at` does."""
        return self.decoder.ropes[number].at(like, positions)

    def _turned(self, x: Tensor, rope: int | None, step: LayerPass, *, interleaved: bool | None = None) -> Tensor:
        """x: [tokens, heads, size]. interleaved: None: as the spec says."""
        if rope is None:
            return x
        cosine, sine = (table[0].unsqueeze(1) for table in step.rotations[rope])
        pairs = self._spec.interleaved if interleaved is None else interleaved
        return (rotate_pairs if pairs else rotate)(x, cosine, sine)

    def _projected(self, layer: DecoderLayer, name: str, x: Tensor, rows: AdapterRows | None) -> Tensor:
        """Returns the output of a linear layer, scaled where the spec says so."""
        return self._scaled(layer, name, layer.linears[name].adapted(x, rows))

    def _scaled(self, layer: DecoderLayer, name: str, y: Tensor) -> Tensor:
        """Returns the output of a linear layer scaled where the spec says so."""
        scale = layer.scales.get(name)
        return y if scale is None else (y.float() * scale).to(y.dtype)

    def _widened(self, layer: DecoderLayer, x: Tensor, rows: AdapterRows | None) -> Tensor:
        """Returns the input of the down projection. x: [tokens, hidden_size]."""
        up = self._projected(layer, "up", x, rows)
        if layer.spec.deviations is not None:
            gate, other = up.chunk(2, -1)
            deviation = gate.std(-1, keepdim=True, correction=0)
            least = gate.mean(-1, keepdim=True) + deviation * torch.tensor(layer.spec.deviations, dtype=x.dtype)
            up = torch.cat([relu(gate - least), other], -1)
        return self._activated(up)

    def _activated(self, up: Tensor) -> Tensor:
        activation = ACTIVATIONS[self._spec.activation]
        if not self._spec.gated_mlp:
            return activation(up)
        gate, other = up.chunk(2, -1)
        return activation(gate) * other

    def _of_input(self, layer: DecoderLayer, x: Tensor, step: LayerPass) -> Tensor:
        """Returns the layer's further input, multiplied by a gate that is computed from x, and projected."""
        assert step.further is not None
        gate = ACTIVATIONS[self._spec.activation](layer.linears["input_gate"].adapted(x, step.rows))
        output: Tensor = layer.linears["input_projection"].adapted(gate * step.further[:, layer.index], step.rows)
        return output

    def _streams(self, hidden: Tensor, rows: AdapterRows | None) -> Tensor | None:
        """Returns the streams of hidden states, [streams, tokens, hidden_size] (Baykal et al. 2023); None: just one."""
        if self.decoder.streams is None:
            return None
        others = (_of_magnitude(projection.adapted(hidden, rows), hidden) for projection in self.decoder.streams[0])
        return torch.stack([hidden, *others])

    def _merged(self, streams: Tensor, rows: AdapterRows | None) -> Tensor:
        assert self.decoder.streams is not None
        back = zip(self.decoder.streams[1], streams[1:], strict=True)
        others = (_of_magnitude(projection.adapted(stream, rows), streams[0]) for projection, stream in back)
        return torch.stack([streams[0], *others]).mean(0)

    def _layer_of_streams(self, layer: DecoderLayer, streams: Tensor, step: LayerPass) -> Tensor:
        """Predicts the layer's output for all streams, computes it for the first, and corrects the others by that."""
        altup, (count, tokens, _) = layer.altup, streams.shape
        assert altup is not None
        router, prediction, correction, *_ = altup.linears.values()

        def numbers(x: Tensor) -> Tensor:
            return router.adapted(self._normed(altup.norm, x) / x.shape[1], step.rows).float().tanh().to(x.dtype)

        of_streams = prediction.adapted(numbers(streams[0]), step.rows).view(tokens, count, count)
        predicted = torch.einsum("jth,tij->ith", streams, of_streams) + streams
        output = self._layer(layer, predicted[0].clone(), step)
        weights = correction.adapted(numbers(output), step.rows) + 1
        corrected = (output - predicted[0]) * weights.T.unsqueeze(2) + predicted
        first = corrected[0] if altup.scale is None else (corrected[0].float() * altup.scale).to(output.dtype)
        corrected[1:] += self._normed(layer.norms.get("input_norm"), self._of_input(layer, first, step))
        return corrected

    def _laurel(self, altup: AltUpLayer, x: Tensor, rows: AdapterRows | None) -> Tensor:
        """Returns a low-rank residual beside attention (LAuReL: Menghani et al. 2024). x: the input of attention."""
        *_, left, right = altup.linears.values()
        return x + self._normed(altup.laurel_norm, right.adapted(left.adapted(x, rows), rows))

    def _normed(self, norm: Norm | None, x: Tensor) -> Tensor:
        """Returns the normalised x, of the same shape, [..., size] or [tokens, heads, head_dim]."""
        if norm is None:
            return x
        if x.dim() == 3 and norm.size != x.shape[2]:  # of all heads together
            return self._normed(norm, x.flatten(1)).view(x.shape)
        if norm.sharded is not None:
            y: Tensor = norm.sharded(x)
            return y
        return self._norm(norm, x)

    def _norm(self, norm: Norm, x: Tensor) -> Tensor:
        return norm(x)


def _variant(layer: DecoderLayer) -> AttentionVariant | None:
    """Returns the attention variant of a layer, with the weights for latents if it has any; None: no attention."""
    if layer.variant is None or layer.latents is None:
        return layer.variant
    return replace(layer.variant, latents=layer.latents.weights())


def routed(layer: DecoderLayer, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token, and their shares in float32: [tokens, experts of a token] each.

    logits: the router's logits, [tokens, experts].
    """
    spec, mixture = layer.spec.mixture, layer.mixture
    assert spec is not None
    scores = logits.float().sigmoid() if spec.sigmoid else logits.float().softmax(-1)
    ranks = scores if spec.bias is None else scores + operator.attrgetter(spec.bias)(mixture).float()
    if spec.groups > 1:
        groups = ranks.unflatten(1, (spec.groups, -1))
        best = groups.topk(spec.group_scores, -1).values.sum(-1).topk(spec.chosen_groups, -1).indices
        hidden = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False).unsqueeze(2)
        ranks = groups.masked_fill(hidden, float("-inf")).flatten(1)
    chosen = ranks.topk(spec.chosen or router_of(layer).top_k, -1).indices
    shares = scores.gather(1, chosen)
    if spec.normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    shares = shares * spec.factor
    if spec.factors is not None:
        shares = shares * operator.attrgetter(spec.factors)(mixture).float()[chosen]
    return chosen, shares


def router_of(layer: DecoderLayer) -> Any:
    """Returns the router of a layer with a mixture: a PackedLinear, or a module of `transformers`."""
    assert layer.spec.mixture is not None
    return operator.attrgetter(layer.spec.mixture.router)(layer.mixture)


def _of_magnitude(x: Tensor, like: Tensor) -> Tensor:
    """Returns x, multiplied so that each row's mean of squares is that of `like`. Both are [tokens, hidden_size]."""
    wanted, actual = (values.float().pow(2).mean(-1, keepdim=True) for values in (like, x))
    return (x.float() * (wanted / actual.clamp(min=1e-5)).sqrt()).to(x.dtype)
