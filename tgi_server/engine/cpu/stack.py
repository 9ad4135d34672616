"""All decoder layers of a model in one kernel call."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from tgi_server.engine.attention.cpu import CpuAttention
from tgi_server.engine.attention.paged_cache import PagedCache
from tgi_server.engine.cpu.decoder import FusedLayer
from tgi_server.engine.cpu.linear import PackedLinear


class LayerStack(nn.Module):
    """Stands where the first of the layers stood; the others are gone.

    A step of one token has hundreds of kernels of a few microseconds. Called from Python one by one, a third of their
    time would go by between them.
    """

    def __init__(self, kernel: Any) -> None:
        """kernel: a `torch.classes.oatmill.Decoder` with all its layers."""
        super().__init__()
        self._kernel = kernel

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> Self | None:
        """None for layers of which one is not fused, or has linear layers that the kernel does not know.

        A layer that is split over several shards is one of those: shards meet in the middle of it.
        """
        fused = [layer for layer in layers if isinstance(layer, FusedLayer)]
        if not fused or len(fused) < len(layers):
            return None
        heads = fused[0].heads
        kernel = torch.classes.oatmill.Decoder(heads.heads, heads.kv_heads, heads.size, fused[0].gated)
        return cls(kernel) if all(_add(kernel, layer) for layer in fused) else None

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        past_key_values: PagedCache,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> Tensor:
        """hidden_states: [1, tokens, hidden_size], as is the result."""
        metadata, backend = past_key_values.metadata, past_key_values.backend
        assert metadata is not None
        assert isinstance(backend, CpuAttention)
        cosine, sine = (None, None) if position_embeddings is None else (table[0] for table in position_embeddings)
        return self._kernel.forward(
            hidden_states[0],
            backend.keys,
            backend.values,
            metadata.slots,
            metadata.block_tables,
            metadata.kv_lengths,
            metadata.query_starts,
            cosine,
            sine,
        ).unsqueeze(0)


def _add(kernel: Any, layer: FusedLayer) -> bool:
    """Whether the kernel knows all that the layer is made of."""
    parts = (layer.qkv, layer.output, layer.up, layer.down)
    linears = [part.kernel() if isinstance(part, PackedLinear) else None for part in parts]
    if any(linear is None for linear in linears):
        return False
    qkv, output, up, down = linears
    norms = layer.attention_norm.kernel(), layer.feed_forward_norm.kernel()
    variant = layer.variant
    kernel.add_layer(norms[0], qkv, output, norms[1], up, down, variant.scaling, variant.window, variant.softcap)
    return True
