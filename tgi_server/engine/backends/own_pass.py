"""The forward pass of `transformers` with its own attention: its logits of a short text, and its attention variants.

All other ways to compute a model are compared with these.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.attention.paged_cache import attention_variant
from tgi_server.engine.models.spec import DecoderSpec
from tgi_server.engine.parallel.layers import ShardedLayer
from tgi_server.engine.parallel.shares import Share

# Tokens of the two prompts; both are the start of the same text.
LONG, SHORT = 8, 5
# Arguments of attention modules that have a bias for each head.
_BIASES = ("alibi", "position_bias")
# Layers of `transformers`' cache, by what they have. Older versions lack some of them.
_WITHOUT_KEYS = {"LinearAttentionLayer", "DummyLayer"}
_OF_ALL_TOKENS = {"DynamicLayer", "DynamicIndexedLayer", "LinearAttentionAndFullAttentionLayer"}
_WITH_WINDOW = {"DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}


@dataclass(frozen=True, slots=True, eq=False)
class OwnPass:
    """Results of a model with its own attention.

    logits: after both prompts, and after one more token of each: [4, vocab_size]. variants: those of the layers that
    call attention through `AttentionInterface`.
    """

    logits: Tensor
    variants: Mapping[int, AttentionVariant]


def own_pass(model: PreTrainedModel) -> OwnPass:
    """Computes a text with the model's own attention, and notes the arguments of its calls."""
    choose_attention(model)
    with _calls_noted(model) as variants:
        return OwnPass(own_logits(model), variants)


def own_logits(model: PreTrainedModel) -> Tensor:
    """Returns the logits of OwnPass. A prompt's logits are those of any text that it starts."""
    tokens = probe_tokens(model, LONG + 1)
    with _own_biases(model):
        logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits
    return logits[0, [LONG - 1, SHORT - 1, LONG, SHORT]]


def choose_attention(model: PreTrainedModel) -> None:
    """Chooses an attention of `transformers` that does what the configuration says."""
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # the default of transformers 5.17 leaves the cap out


@contextmanager
def _calls_noted(model: PreTrainedModel) -> Iterator[dict[int, AttentionVariant]]:
    """Yields the attention variants that modules pass to the attention function, by their layer."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    own, known = ALL_ATTENTION_FUNCTIONS.get(name), dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    variants: dict[int, AttentionVariant] = {}
    keys: list[tuple[int, Tensor]] = []

    def noted(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        source = next((index for index, earlier in keys if earlier is key), layer)
        keys.append((layer, key))
        variants[layer] = attention_variant(query, kwargs, None if source == layer else source)
        function = own or sys.modules[type(module).__module__].eager_attention_forward
        return function(module, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = noted
    try:
        yield variants
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping = known


@contextmanager
def _own_biases(model: nn.Module) -> Iterator[None]:
    """Gives the attention modules of a shard the biases of their own heads (alibi), not those of all heads."""

    def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        share: Any = module.share
        heads = slice(share.queries.start, share.queries.stop)
        return args, kwargs | {name: bias[heads] for name in _BIASES if (bias := kwargs.get(name)) is not None}

    modules = [attention for attention in model.modules() if isinstance(getattr(attention, "share", None), Share)]
    hooks = [
        attention.register_forward_pre_hook(cut, with_kwargs=True)
        for attention in modules
        if not isinstance(attention, ShardedLayer)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def window_objection(
    model: PreTrainedModel, variants: Mapping[int, AttentionVariant], spec: DecoderSpec | None = None
) -> str | None:
    """Returns the reason why layers do not attend as the configuration says; None if they do.

    spec: the model's spec. A window that it gives a layer is taken as right, since the layer itself does not report it.
    """
    untold = set() if spec is None else {layer for layer, of_layer in enumerate(spec.layers) if of_layer.window}
    said = {layer: (0 if layer in untold else variant.window, variant.chunk) for layer, variant in variants.items()}
    return (
        None if said == windows_of(model) else "its layers look at other tokens than they tell the attention function"
    )


def probe_tokens(model: PreTrainedModel, count: int) -> Tensor:
    """Returns some tokens of the model's vocabulary: [count] int64."""
    return torch.arange(count, device=model.device) % model.config.get_text_config(decoder=True).vocab_size


def windows_of(model: PreTrainedModel) -> dict[int, tuple[int, int] | None]:
    """Returns the window and the chunk of each layer with keys by the model's configuration; None: another kind.

    A probe is too short to show them, so the variants that layers report are compared with this.
    """
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    chunked = {index for index, kind in enumerate(types) if kind == "chunked_attention"}
    layers: dict[int, Any] = dict(enumerate(DynamicCache(config=model.config).layers))
    for index, source in _shared(model).items():
        layers[index] = layers[source]
    return {
        index: _window(layer, chunked=index in chunked)
        for index, layer in layers.items()
        if type(layer).__name__ not in _WITHOUT_KEYS
    }


def _window(layer: Any, *, chunked: bool) -> tuple[int, int] | None:
    if type(layer).__name__ in _WITH_WINDOW:
        size = int(layer.sliding_window)
        return (0, size) if chunked else (size, 0)
    return (0, 0) if type(layer).__name__ in _OF_ALL_TOKENS else None


def _shared(model: PreTrainedModel) -> dict[int, int]:
    """Returns the layers that have no keys of their own by the configuration, each with the first layer of its type."""
    config = model.config.get_text_config(decoder=True)
    modes = getattr(config, "kv_sharing_modes", ())
    return {
        index: config.layer_types.index(config.layer_types[index])
        for index, mode in enumerate(modes)
        if mode == "reuse"
    }
