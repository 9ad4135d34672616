"""Models without a spec: the forward pass of `transformers` on the paged KV cache.

Torch hooks add LoRA deltas to linear layers, add images to the outputs of layers, and read hidden states.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tgi_server.engine.backends.attention.base import AttentionBackend, AttentionVariant
from tgi_server.engine.backends.attention.paged_cache import IMPLEMENTATION, PagedCache
from tgi_server.engine.backends.base import ImageTokens, Keep, MakeLora, PagedModel, PassInput
from tgi_server.engine.backends.lora import AdaptedLinear, AdapterRows
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.linear import PackedLinear

# Layers of a mixture that get only the rows of an expert. Hooks cannot know which rows these are.
_OF_EXPERTS = ".experts."
# Layers whose weight the model reads without calling them, of Mamba; and those that choose experts.
_NOT_FOR_ROWS = (".dt_proj", ".router")


class CurrentRows:
    """The adapters of the current pass, for the layers that adapters change; None: no row has an adapter."""

    def __init__(self) -> None:
        self.rows: AdapterRows | None = None


class GenericModel(PagedModel):
    """Calls a model of `transformers`, which finds the KV blocks in its modules' `paged_cache`.

    variants: how layers attend.
    """

    source: PreTrainedModel

    def __init__(self, source: PreTrainedModel, attention: AttentionBackend) -> None:
        super().__init__(source, attention)
        self.variants: Mapping[int, AttentionVariant] = {}
        self._current = CurrentRows()
        self._cache = PagedCache(attention)
        self._cache.attach(source)
        self._keep: Keep | None = None
        self._tapped: list[Tensor] = []
        self._taps: list[RemovableHandle] = []
        self._images: ImageTokens | None = None  # of the pass that runs
        self._adding = 0  # layers whose outputs images may change

    def forward(self, inputs: PassInput) -> Tensor:
        self._cache.backend, self._cache.metadata = self.attention, inputs.metadata
        self._current.rows = inputs.adapters
        self._images = inputs.images
        output = self.source(
            **self._embedded(inputs),
            position_ids=_position_ids(inputs),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=0 if inputs.wanted is None else inputs.wanted,
        )
        self._images = None
        self._current.rows = None  # whoever drafts may use layers of the model for other rows
        if self._keep is not None:
            *layers, head = self._tapped
            self._tapped = []
            self._keep([head, *layers])
        logits: Tensor = output.logits[0]
        return logits

    def _embedded(self, inputs: PassInput) -> dict[str, Tensor]:
        """Returns the arguments of the model for a pass's tokens."""
        tokens, images = inputs.tokens.unsqueeze(0), inputs.images
        if images is None:
            return {"input_ids": tokens}
        while self._adding < len(images.added):
            _layer(self.source, self._adding).register_forward_hook(partial(self._add_images, self._adding))
            self._adding += 1
        embeddings = self.source.get_input_embeddings()(tokens)
        embedded = {"inputs_embeds": embeddings.index_copy(1, images.rows, images.embeddings[None])}
        decoder: Any = self.source.get_decoder()
        if getattr(decoder, "hidden_size_per_layer_input", None):  # which `transformers` cannot find without the tokens
            embedded["per_layer_inputs"] = decoder.get_per_layer_inputs(tokens, None)
        return embedded

    def _add_images(self, layer: int, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor | None:
        images = self._images
        if images is None or layer >= len(images.added):
            return None
        return output.index_add(1, images.rows, images.added[layer][None])

    def tap(self, layers: Sequence[int], keep: Keep) -> None:
        while self._taps:
            self._taps.pop().remove()
        modules = [_layer(self.source, index) for index in layers]
        self._taps = [
            module.register_forward_pre_hook(self._note, with_kwargs=True)
            for module in (*modules, self.source.get_output_embeddings())
        ]
        self._keep = keep

    def adapt(self, lora: MakeLora) -> list[AdaptedLinear]:
        self.adapted = True
        return adapt_modules(self.source, self._current, lora)

    def _note(self, _: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        hidden = inputs[0] if inputs else named["hidden_states"]
        if hidden.dim() == 3:  # [1, tokens, hidden_size]; drafters that share the head give it rows alone
            self._tapped.append(hidden[0])


def _position_ids(inputs: PassInput) -> Tensor:
    """Returns positions as the models of `transformers` take them: those of the text before the three of images."""
    if inputs.rotary is None or inputs.rotary.dim() == 1:
        return (inputs.positions if inputs.rotary is None else inputs.rotary).unsqueeze(0)
    return torch.cat([inputs.positions[None], inputs.rotary]).unsqueeze(1)


def adapt_modules(model: nn.Module, current: CurrentRows, lora: MakeLora) -> list[AdaptedLinear]:
    """Adds hooks that change the outputs of a model's linear layers. Returns the places for LoRA deltas.

    current: set before each pass.
    """
    layers = []
    for path, module in model.named_modules():
        if _is_linear(module) and _OF_EXPERTS not in path and not path.endswith(_NOT_FOR_ROWS):
            inputs, outputs = _sizes(module)
            adapted = AdaptedLinear([(path.removesuffix(".inner"), outputs)], inputs, lora(outputs, 1))
            module.register_forward_hook(partial(_changed, adapted, current))
            layers.append(adapted)
    return layers


def install_paged_attention(model: PreTrainedModel) -> Callable[[], None]:
    """Makes the model attend through its modules' `paged_cache`. Returns a function that undoes it.

    A model may ignore this: the caller must check that it attends in this way, and correctly.
    """
    own = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    return partial(model.set_attn_implementation, own)


def _changed(
    adapted: AdaptedLinear, current: CurrentRows, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor | None:
    """Returns a layer's output with the deltas of the rows of this pass; None if they change nothing."""
    rows = current.rows
    return None if rows is None or not adapted.changes(rows) else adapted.apply(inputs[0], output, rows)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D | QuantizedLinear | PackedLinear)


def _sizes(linear: Any) -> tuple[int, int]:
    """Returns the numbers of inputs and outputs."""
    if isinstance(linear, Conv1D):
        return int(linear.weight.shape[0]), int(linear.nf)
    return int(linear.in_features), int(linear.out_features)


def _layer(model: PreTrainedModel, index: int) -> nn.Module:
    """Returns the decoder layer `index`, or the norm after the last layer if `index` is the number of layers."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    if index == count:
        norm: nn.Module = model.get_decoder().norm
        return norm
    lists: Iterator[nn.ModuleList] = (each for each in model.modules() if isinstance(each, nn.ModuleList))
    return next(modules[index] for modules in lists if len(modules) == count)
