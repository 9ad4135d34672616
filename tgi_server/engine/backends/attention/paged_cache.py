"""The seam between `transformers` model code and the paged KV cache.

A model that goes through `AttentionInterface` calls, in each layer, first `cache.update(key, value, layer)` and then
the attention function. Here the first writes the keys and values into KV blocks and the second attends over them, so
the model code between the two never sees history. The attention function finds its cache as an attribute of the
attention module that calls it: there is no global state.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, Cache

from tgi_server.engine.backends.attention.base import AttentionBackend, AttentionVariant, ForwardMetadata
from tgi_server.engine.backends.states import SequenceStates
from tgi_server.engine.errors import UnsupportedModel

IMPLEMENTATION = "oatmill_paged"


class PagedCache(Cache):
    """The cache object that is handed to a model of `transformers`; it holds no keys itself.

    backend: owns the KV blocks. states: of layers without keys; None: the model has none. metadata: the places of the
    current forward pass's tokens. positions: their positions, [tokens] int64. Both are set before each pass.
    """

    positions: Tensor

    def __init__(self, backend: AttentionBackend, states: SequenceStates | None = None) -> None:
        super().__init__(layers=[])
        self.backend = backend
        self.states = states
        self.metadata: ForwardMetadata | None = None
        self._written_by_attention: set[int] = set()
        self._of_latents: set[int] = set()

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """key and value: [1, kv_heads, tokens, head_dim]; returned as they came."""
        if layer_idx not in self._written_by_attention:
            # Blocks have as much for a value as for a key; attention gives back as much as the value had.
            narrower = 0 if layer_idx in self._of_latents else key.shape[-1] - value.shape[-1]
            self.write(layer_idx, key, functional.pad(value, (0, narrower)) if narrower > 0 else value)
        key.cached_by = layer_idx  # type: ignore[attr-defined]
        return key, value

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """key and value: [1, kv_heads, tokens, size] each."""
        assert self.metadata is not None
        self.backend.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), self.metadata)

    def attend(self, layer: int, query: Tensor, variant: AttentionVariant) -> Tensor:
        """query: [1, heads, tokens, head_dim]. Returns [1, tokens, heads, head_dim]."""
        assert self.metadata is not None
        return self.backend.attend(layer, query[0].transpose(0, 1), self.metadata, variant).unsqueeze(0)

    def attach(self, model: nn.Module) -> None:
        """Makes this the cache that the model's attention modules find. Those that write into it themselves say so."""
        for module in model.modules():
            if getattr(module, "layer_idx", None) is not None:
                module.paged_cache = self
                if getattr(getattr(module, "variant", None), "latents", None) is not None:
                    self._of_latents.add(int(module.layer_idx))  # type: ignore[arg-type]
            if getattr(module, "writes_cache", False):
                self._written_by_attention.add(int(module.layer_idx))  # type: ignore[arg-type]

    def get_seq_length(self, layer_idx: int = 0, *_: Any, **__: Any) -> int:
        """Returns 0: positions are passed to the model, so every pass may look like the first one."""
        return 0

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Returns None, so that mixers compute every pass like the first one: their functions know the states."""

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns the inputs of a convolution as they came."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Does nothing: the state is in its slot already."""
        return recurrent_states

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False


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
    sinks: Tensor | None = kwargs.get("s_aux")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    variant = AttentionVariant(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=None if sinks is None else sinks.float(),
        keys_of=source if (source := getattr(key, "cached_by", layer)) != layer else None,
    )
    cache: PagedCache = module.paged_cache  # type: ignore[assignment]
    return cache.attend(layer, query, variant)[..., : value.shape[-1]], None


AttentionInterface.register(IMPLEMENTATION, paged_attention)
