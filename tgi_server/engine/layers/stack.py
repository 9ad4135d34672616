"""All decoder layers of a model in one kernel call, on CPUs."""

from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from tgi_server.engine.attention.cpu import CpuAttention
from tgi_server.engine.attention.paged_cache import PagedCache
from tgi_server.engine.layers.decoder import FusedLayer, linear_kernel
from tgi_server.engine.layers.norm import Norm


class LayerStack(nn.Module):
    """Decoder layers of a model, mostly all of them, in one kernel call. It takes their place.

    A step of one token has hundreds of kernels of a few microseconds. If Python called them one by one, a third of the
    time would pass between them.

    layers: those that it computes. adapter_numbers: returns those of the rows of the pass that runs, [tokens] int32;
    None: no row has an adapter.
    """

    adapter_numbers: Callable[[], Tensor | None]

    def __init__(self, kernel: Any, layers: list[FusedLayer]) -> None:
        """kernel: a `torch.classes.oatmill.Decoder` with all the layers."""
        super().__init__()
        self.kernel = kernel
        self.layers = layers
        self.adapter_numbers = lambda: None

    @classmethod
    def of(cls, layers: Sequence[nn.Module], *, rotations: bool = True) -> Self | None:
        """Returns None if a layer is not fused, or has linear layers that the kernel does not know.

        A layer that is split over several shards is not known: the shards exchange results in the middle of it.
        rotations: False: the stack will get one kind of rotary tables, so that it takes no layers of several.
        """
        fused = [layer for layer in layers if isinstance(layer, FusedLayer)]
        if not fused or len(fused) < len(layers):
            return None
        if not rotations and any(layer.rotation for layer in fused):
            return None
        heads = fused[0].heads
        kernel = torch.classes.oatmill.Decoder(heads.heads, heads.kv_heads, heads.size, fused[0].activation)
        return cls(kernel, fused) if all(_add(kernel, layer) for layer in fused) else None

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        past_key_values: PagedCache,
        position_embeddings: tuple[Tensor, Tensor] | Sequence[tuple[Tensor, Tensor]] | None = None,
        wanted: Tensor | None = None,
        **__: Any,
    ) -> Tensor:
        """Returns the last layer's output, [1, rows, hidden_size]. hidden_states: [1, tokens, hidden_size].

        position_embeddings: the rotary tables of all layers, or of each kind of them.
        wanted: [rows] int64, the tokens of which it is wanted, in order, and each sequence's last ones; of the others
        the last layer leaves keys and values in the cache, and no more. None: all.
        """
        metadata, backend = past_key_values.metadata, past_key_values.backend
        assert metadata is not None
        assert isinstance(backend, CpuAttention)
        first, adapters = self.layers[0].index, self.adapter_numbers()
        caches = slice(first, first + len(self.layers))
        # Steps of any lengths are padded: in what is wanted of the padding there is no order.
        whole = adapters is not None or backend.any_lengths
        kinds = cast(Sequence[Any], position_embeddings or ())
        if len(kinds) > 0 and isinstance(kinds[0], Tensor):
            kinds = [kinds]
        output = self.kernel.forward(
            hidden_states[0],
            backend.keys[caches],
            backend.values[caches],
            backend.key_scales[caches],
            backend.value_scales[caches],
            metadata.slots,
            metadata.block_tables,
            metadata.kv_lengths,
            metadata.query_starts,
            [cosine[0] for cosine, _ in kinds],
            [sine[0] for _, sine in kinds],
            adapters,
            None if whole else wanted,
        )
        return (output[wanted] if whole and wanted is not None else output).unsqueeze(0)


def _add(kernel: Any, layer: FusedLayer) -> bool:
    """Returns True if the kernel knows all that the layer is made of, and has it."""
    qkv, output, feed_forward = linear_kernel(layer.qkv), linear_kernel(layer.output), layer.feed_forward_kernels()
    if qkv is None or output is None or feed_forward is None:
        return False
    head_norms = [cast(Norm, norm).kernel() for norm in layer.head_norms]
    norms = layer.attention_norm.kernel(), layer.feed_forward_norm.kernel()
    variant = layer.variant
    attention = norms[0], qkv, head_norms, output
    scores = variant.scaling, variant.window, variant.softcap, variant.sinks
    added_norms = [cast(Norm, norm).kernel() for norm in layer.added_norms]
    rotation = -1 if layer.rotation is None else layer.rotation
    kernel.add_layer(*attention, norms[1], *feed_forward, added_norms, rotation, *scores)
    return True
