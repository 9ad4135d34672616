"""Models of specs on GPUs: a few kernels in Triton and products of cuBLAS for each layer, captured as CUDA graphs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tgi_server.engine.backends.attention.base import AttentionBackend, ForwardMetadata
from tgi_server.engine.backends.base import Keep, MakeLora, PagedModel, PassInput
from tgi_server.engine.backends.decoder import Decoder, DecoderLayer, Norm
from tgi_server.engine.backends.lora import AdaptedLinear, AdapterRows
from tgi_server.engine.kernels.triton import norm_and_gate
from tgi_server.engine.linear import PackedLinear
from tgi_server.engine.parallel.layers import RowParallel

Rotation = tuple[Tensor, Tensor]


class CudaModel(PagedModel):
    """Runs a decoder layer by layer. The host never reads a result in between, so any step can be captured."""

    name = "fused layers"

    def __init__(self, source: nn.Module, decoder: Decoder, attention: AttentionBackend) -> None:
        super().__init__(source, attention)
        self.decoder = decoder
        self._spec = decoder.spec
        self._tapped: frozenset[int] = frozenset()
        self._keep: Keep | None = None
        # as the model's dtype has it
        self._embedding_scale = float(torch.tensor(self._spec.embedding_scale, dtype=attention.dtype))

    def forward(self, inputs: PassInput) -> Tensor:
        decoder, rows, taps = self.decoder, inputs.adapters, []
        hidden = self._embedded(inputs)
        turns = inputs.positions if inputs.rotary is None else inputs.rotary
        rotations = [rope.at(hidden, turns) for rope in decoder.ropes]
        for layer in decoder.layers:
            if layer.index in self._tapped:
                taps.append(hidden.clone())  # to which the layer may add in place
            hidden = self._layer(layer, hidden, rotations, inputs.metadata, rows)
            if inputs.images is not None and layer.index < len(inputs.images.added):
                hidden = hidden.index_add(0, inputs.images.rows, inputs.images.added[layer.index])
        if inputs.wanted is not None:
            hidden = hidden[inputs.wanted]
        hidden = _normed(decoder.norm, hidden)
        if self._keep is not None:
            self._keep([hidden, *taps])
        return self._logits(hidden, rows)

    def tap(self, layers: Sequence[int], keep: Keep) -> None:
        self._tapped, self._keep = frozenset(layers), keep

    def adapt(self, lora: MakeLora) -> list[AdaptedLinear]:
        self.adapted = True
        places = []
        for linear, parts in self.decoder.linears():
            linear.lora = AdaptedLinear(parts, linear.in_features, lora(linear.out_features, len(parts)))
            places.append(linear.lora)
        return places

    def _embedded(self, inputs: PassInput) -> Tensor:
        hidden: Tensor = self.decoder.embedding(inputs.tokens)
        if self._embedding_scale != 1:
            hidden = hidden * self._embedding_scale
        if inputs.images is not None:
            hidden = hidden.index_copy(0, inputs.images.rows, inputs.images.embeddings)
        if self.decoder.positions is not None:
            hidden = hidden + self.decoder.positions[inputs.positions]
        return _normed(self.decoder.embedding_norm, hidden)

    def _layer(
        self,
        layer: DecoderLayer,
        residual: Tensor,
        rotations: Sequence[Rotation],
        metadata: ForwardMetadata,
        rows: AdapterRows | None,
    ) -> Tensor:
        """Returns the layer's output; it and residual are [tokens, hidden_size]."""
        assert layer.output is not None  # models with layers that do not attend have no spec here
        normed = _normed(layer.norms.get("attention_norm"), residual)
        attended = self._attend(layer, normed, rotations, metadata, rows)
        if self._spec.parallel and "feed_forward_norm" in layer.norms:
            normed = _normed(layer.norms["feed_forward_norm"], residual)
        residual = self._added(residual, layer.output, attended, layer.norms.get("attended_norm"), rows)
        if not self._spec.parallel:
            normed = _normed(layer.norms.get("feed_forward_norm"), residual)
        if layer.mixture is not None:
            return self._sum(residual, self._mixed(layer, normed, rows), layer.norms.get("fed_norm"))
        assert layer.up is not None
        assert layer.down is not None
        widened = self._widened(layer.up, normed, rows)
        return self._added(residual, layer.down, widened, layer.norms.get("fed_norm"), rows)

    def _mixed(self, layer: DecoderLayer, x: Tensor, rows: AdapterRows | None) -> Tensor:
        """Returns what a mixture of experts makes of x, [tokens, hidden_size], with that of the shared expert."""
        assert layer.spec.mixture is not None
        if layer.up is None or layer.down is None:
            output = layer.mixture(x.unsqueeze(0))
            return (output[0] if isinstance(output, tuple) else output)[0]  # beside it, what the router says
        _, shares, chosen = getattr(layer.mixture, layer.spec.mixture.router)(x)
        output = layer.mixture.experts(x, chosen, shares)
        shared = layer.down.adapted(self._widened(layer.up, x, rows), rows)
        return output + (shared if layer.shared_gate is None else layer.shared_gate.adapted(x, rows).sigmoid() * shared)

    def _attend(
        self,
        layer: DecoderLayer,
        x: Tensor,
        rotations: Sequence[Rotation],
        metadata: ForwardMetadata,
        rows: AdapterRows | None,
    ) -> Tensor:
        assert layer.heads is not None
        assert layer.variant is not None
        assert layer.qkv is not None
        heads, kv_heads, size = layer.heads.heads, layer.heads.kv_heads, layer.heads.size
        joined = layer.qkv.adapted(x, rows)
        if clip := layer.spec.clip:
            joined = joined.clamp(-clip, clip)
        if layer.spec.grouped:
            groups = joined.view(len(x), kv_heads, heads // kv_heads + 2, size)
            query, key, value = groups[:, :, :-2].reshape(len(x), heads, size), groups[:, :, -2], groups[:, :, -1]
        else:
            joined = joined.view(len(x), heads + 2 * kv_heads, size)
            query, key, value = joined.split_with_sizes((heads, kv_heads, kv_heads), 1)
        query = _normed(layer.norms.get("query_norm"), query)
        key = _normed(layer.norms.get("key_norm"), key)
        if layer.spec.rope is None:
            self.attention.write(layer.index, key, value, metadata)
        else:
            rotation, interleaved = rotations[layer.spec.rope], self._spec.interleaved
            query = self.attention.rotate_and_write(
                layer.index, query, key, value, rotation, metadata, interleaved=interleaved
            )
        return self.attention.attend(layer.index, query, metadata, layer.variant).flatten(1)

    def _added(
        self,
        residual: Tensor,
        linear: PackedLinear | RowParallel,
        x: Tensor,
        norm: Norm | None,
        rows: AdapterRows | None,
    ) -> Tensor:
        """Returns residual and the linear layer's output for x, normalised and scaled where the spec says so."""
        if norm is None and self._spec.residual_scale == 1:
            return linear.adapted(x, rows, residual=residual)
        return self._sum(residual, linear.adapted(x, rows), norm)

    def _sum(self, residual: Tensor, output: Tensor, norm: Norm | None) -> Tensor:
        """Returns residual and a part's output, normalised and scaled where the spec says so."""
        output, scale = _normed(norm, output), self._spec.residual_scale
        return residual + (output if scale == 1 else output * scale)

    def _widened(self, up: PackedLinear, x: Tensor, rows: AdapterRows | None) -> Tensor:
        """Returns the input of the down projection. x: [tokens, hidden_size]."""
        return norm_and_gate.activate(up.adapted(x, rows), self._spec.activation, gated=self._spec.gated_mlp)

    def _logits(self, hidden: Tensor, rows: AdapterRows | None) -> Tensor:
        logits = self.decoder.head.adapted(hidden, rows)
        if self._spec.logits_divisor != 1:
            logits = logits / self._spec.logits_divisor
        if cap := self._spec.logits_softcap:
            logits = torch.tanh(logits / cap) * cap
        return logits


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    """Returns the normalised x, of the same shape, [..., size] or [tokens, heads, head_dim]."""
    if norm is None:
        return x
    if x.dim() == 3 and norm.size != x.shape[2]:  # of all heads together
        return _normed(norm, x.flatten(1)).view(x.shape)
    if norm.sharded is not None:
        y: Tensor = norm.sharded(x)
        return y
    if not norm.centred:
        return norm_and_gate.rms_norm(x, norm.weight, norm.eps)
    if norm.bias is not None:
        return norm_and_gate.layer_norm(x, norm.weight, norm.bias, norm.eps)
    return norm(x)
