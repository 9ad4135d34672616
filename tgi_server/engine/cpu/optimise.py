"""Rebuilds a model of `transformers` for a CPU, in place."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from tgi_server.engine.attention.base import AttentionBackend, AttentionVariant
from tgi_server.engine.attention.cpu import CpuAttention
from tgi_server.engine.cpu.decoder import FUSED_LAYERS
from tgi_server.engine.cpu.forward import shorten_forward
from tgi_server.engine.cpu.head import ScreenedHead
from tgi_server.engine.cpu.int8 import Int8Linear
from tgi_server.engine.cpu.linear import Bf16Linear, PackedLinear
from tgi_server.engine.cpu.stack import LayerStack
from tgi_server.engine.errors import UnsupportedModel


def linear_layer(quantize: str | None, dtype: torch.dtype, *, custom_kernels: bool) -> type[PackedLinear]:
    """The kind of linear layer that holds weights of this dtype, quantised as asked.

    Raises UnsupportedModel when there is none.
    """
    if quantize is None:
        return Bf16Linear if custom_kernels and Bf16Linear.supports(dtype) else PackedLinear
    if quantize != "int8":
        raise UnsupportedModel(f"--quantize {quantize} is not supported; on a CPU, int8 is")
    if not (custom_kernels and Int8Linear.supported()):
        raise UnsupportedModel("--quantize int8 needs a CPU with AVX-512 VNNI, and the CPU kernels; leave it out")
    return Int8Linear


def optimise(
    model: PreTrainedModel,
    backend: AttentionBackend | None = None,
    variants: Mapping[int, AttentionVariant] | None = None,
    linear: type[PackedLinear] = PackedLinear,
) -> None:
    """Packs the weights of all linear layers, and fuses the decoder layers that are known.

    backend, variants: what a model on the paged path attends with, and how each of its layers does. Layers are fused
    only with the CPU's own backend. linear: the kind of linear layer that takes the place of torch's.
    """
    if model.dtype not in (torch.float32, torch.bfloat16):
        return
    if variants and isinstance(backend, CpuAttention):
        _replace(model, partial(_fused_layer, variants, linear))
        _replace(model, _stacked_layers)
        _screen_head(model, linear)
    _replace(model, partial(_packed_linear, linear))
    shorten_forward(model)


def unpack(model: PreTrainedModel) -> None:
    """Takes back what packing did, for a model that looks at its weights itself."""
    _replace(model, lambda module: module.unpacked() if isinstance(module, PackedLinear) else None)


def _fused_layer(
    variants: Mapping[int, AttentionVariant], linear: type[PackedLinear], module: nn.Module
) -> nn.Module | None:
    fused = FUSED_LAYERS.get(type(module).__name__)
    if fused is None or not fused.fits(module):
        return None
    return fused(module, variants[int(cast(Any, module).self_attn.layer_idx)], linear)


def _stacked_layers(module: nn.Module) -> nn.Module | None:
    stack = LayerStack.of(list(module)) if isinstance(module, nn.ModuleList) else None
    return None if stack is None else nn.ModuleList([stack])


def _screen_head(model: PreTrainedModel, linear: type[PackedLinear]) -> None:
    """Only where nothing is done to the head's outputs: architectures whose layers are stacked do nothing to them."""
    head = model.get_output_embeddings()
    stacked = any(isinstance(module, LayerStack) for module in model.modules())
    plain = type(head) is nn.Linear and head.bias is None
    if stacked and plain and linear is Bf16Linear and ScreenedHead.pays(head.weight):
        model.set_output_embeddings(ScreenedHead(head.weight))


def _packed_linear(linear: type[PackedLinear], module: nn.Module) -> nn.Module | None:
    return linear(module.weight, module.bias) if type(module) is nn.Linear else None


def _replace(module: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    for name, child in module.named_children():
        new = replacement(child)
        if new is None:
            _replace(child, replacement)
        else:
            setattr(module, name, new)
