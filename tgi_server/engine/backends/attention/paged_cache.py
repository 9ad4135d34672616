"""The seam between `transformers` model code and the paged KV cache.

A model that goes through `AttentionInterface` calls, in each layer, first `cache.update(key, value, layer)` and then
the attention function. Here the first writes the keys and values into KV blocks and the second attends over them, so
the model code between the two never sees history. The attention function finds its cache as an attribute of the
attention module that calls it: there is no global state.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, Cache

from tgi_server.engine.backends.attention.base import AttentionBackend, AttentionVariant, ForwardMetadata
from tgi_server.engine.errors import UnsupportedModel

IMPLEMENTATION = "oatmill_paged"


class PagedCache(Cache):
    """The cache object that is handed to a model of `transformers`; it holds no keys itself.

    backend: owns the KV blocks. metadata: metadata of the current forward pass, set before each pass.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__(layers=[])
        self.backend = backend
        self.metadata: ForwardMetadata | None = None

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes key and value, [1, kv_heads, tokens, head_dim], into their slots, and returns them."""
        assert self.metadata is not None
        # In blocks a value has as many elements as a key; the output of attention has only those of the value.
        padded = functional.pad(value, (0, max(0, key.shape[-1] - value.shape[-1])))
        self.backend.write(layer_idx, key[0].transpose(0, 1), padded[0].transpose(0, 1), self.metadata)
        key.cached_by = layer_idx  # type: ignore[attr-defined]
        return key, value

    def attend(self, layer: int, query: Tensor, variant: AttentionVariant) -> Tensor:
        """Returns attention, [1, tokens, heads, head_dim]. query: [1, heads, tokens, head_dim]."""
        assert self.metadata is not None
        return self.backend.attend(layer, query[0].transpose(0, 1), self.metadata, variant).unsqueeze(0)

    def attach(self, model: nn.Module) -> None:
        """Makes this the cache that the model's attention modules find."""
        for module in model.modules():
            if getattr(module, "layer_idx", None) is not None:
                module.paged_cache = self

    def get_seq_length(self, layer_idx: int = 0, *_: Any, **__: Any) -> int:
        """Returns 0: positions are passed to the model, so every pass may look like the first one."""
        return 0


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention for the models of `transformers`, which call it through `AttentionInterface`.

    A layer that shares the keys of an earlier one hands over the tensor that the cache returned to that layer.

    Raises UnsupportedModel for an argument that would change the result and is not supported.
    """
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModel("the paged path does not support position biases")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    source = getattr(key, "cached_by", layer)
    said = kwargs | {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
    variant = attention_variant(query, said, source if source != layer else None)
    cache: PagedCache = module.paged_cache  # type: ignore[assignment]
    return cache.attend(layer, query, variant)[..., : value.shape[-1]], None


def attention_variant(query: Tensor, said: Mapping[str, Any], keys_of: int | None) -> AttentionVariant:
    """Returns the attention variant of a layer of `transformers`. query: [1, heads, tokens, head_dim].

    said: the arguments of the attention function by their names. keys_of: see AttentionVariant.
    """
    scaling, sinks = said.get("scaling"), said.get("s_aux")
    return AttentionVariant(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=said.get("sliding_window") or 0,
        softcap=said.get("softcap") or 0.0,
        sinks=None if sinks is None else sinks.float(),
        keys_of=keys_of,
    )


AttentionInterface.register(IMPLEMENTATION, paged_attention)
