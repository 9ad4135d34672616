"""Rebuilds a model of `transformers` for a device, in place."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from tgi_server.engine.attention.base import AttentionBackend, AttentionVariant
from tgi_server.engine.attention.cpu import CpuAttention
from tgi_server.engine.checkpoint.quantized import Experts, QuantizedLinear
from tgi_server.engine.layers.decoder import FUSED_LAYERS, FusedLayer
from tgi_server.engine.layers.forward import WholeModel, decoder_kernel
from tgi_server.engine.layers.head import ScreenedHead
from tgi_server.engine.linear import LinearFactory, PackedLinear
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.memory import Leftovers, forget_pages, large_memory_apart
from tgi_server.engine.progress import counted
from tgi_server.loading import PACKING

logger = logging.getLogger(__name__)

# Below this a linear layer is done before a second thread has joined in: some 50 microseconds of memory traffic.
SMALL_LAYER_BYTES = 1 << 20


@large_memory_apart()
def optimise(
    model: nn.Module,
    backend: AttentionBackend | None = None,
    variants: Mapping[int, AttentionVariant] | None = None,
    *,
    linear: LinearFactory,
) -> None:
    """Packs the weights of all linear layers, and fuses the decoder layers that are known; if all are, the whole model.

    backend, variants: the attention backend of a model on the paged path, and the attention variant of each layer.
    Layers are fused only with the CPU's own backend. linear: makes the layers that replace torch's.
    """
    kernel = None
    if variants and isinstance(backend, CpuAttention):
        forget_pages([cast(PreTrainedModel, model).get_output_embeddings().weight])  # which trials have read
        _replace(model, partial(_fused_layer, variants, linear))
        for layer in [module for module in model.modules() if isinstance(module, FusedLayer)]:
            _replace(layer, partial(_packed_linear, linear))  # the experts of a mixture, which it has kept
        kernel = decoder_kernel(model)
        if kernel is not None:
            _screen_head(cast(PreTrainedModel, model), linear)
    _replace(model, partial(_packed_linear, linear))
    _compute_experts_together(model, wanted=True)
    if kernel is not None and (whole := WholeModel.of(cast(PreTrainedModel, model), kernel)) is not None:
        model.forward = whole  # for probes; steps know that it is more


def fuse(
    model: PreTrainedModel,
    variants: Mapping[int, AttentionVariant],
    fault: Callable[[], str | None],
    linear: LinearFactory,
) -> str | None:
    """Fuses the decoder layers that are known, and leaves all else as it is. Returns why not, if it does not.

    variants: the attention variant of each layer. fault: computes some tokens, and returns what is wrong with the
    model; it is asked when one layer is fused, while the others are as they were. linear: makes the linear layers.
    """
    places = [  # not the layers themselves: the memory of each is needed as soon as it is replaced
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ in FUSED_LAYERS
    ]
    for number, (parent, name) in enumerate(places):
        child = parent.get_submodule(name)
        fused = _fused_layer(variants, linear, child)
        if fused is None:
            continue
        setattr(parent, name, fused)
        if number == 0 and (reason := fault()) is not None:
            setattr(parent, name, child)
            return reason
    return None


def pack_codes(model: PreTrainedModel, linear: LinearFactory) -> None:
    """Packs the quantised weights of all linear layers for which there are kernels, and leaves all else as it is."""
    _replace(model, lambda module: _packed_linear(linear, module) if isinstance(module, QuantizedLinear) else None)


def unpack(model: PreTrainedModel) -> None:
    """Puts plain linear layers back, for a model that reads its weights itself."""
    _replace(model, lambda module: module.unpacked() if isinstance(module, PackedLinear | QuantizedLinear) else None)
    _compute_experts_together(model, wanted=False)


def _fused_layer(
    variants: Mapping[int, AttentionVariant], linear: LinearFactory, module: nn.Module
) -> nn.Module | None:
    for fused in FUSED_LAYERS.get(type(module).__name__, ()):
        if fused.fits(module, linear):
            return fused(module, variants[int(cast(Any, module).self_attn.layer_idx)], linear)
    return None


def _screen_head(model: PreTrainedModel, linear: LinearFactory) -> None:
    """Replaces the head of a model that is one kernel call by a ScreenedHead, where that pays."""
    head = model.get_output_embeddings()
    plain = type(head) is nn.Linear and head.bias is None
    if plain and linear.layer is FloatLinear and ScreenedHead.pays(head.weight):
        model.set_output_embeddings(ScreenedHead(head.weight, None, linear.kernels))


def _packed_linear(linear: LinearFactory, module: nn.Module) -> nn.Module | None:
    if isinstance(module, Experts):  # whose other layers follow, one by one
        for parts in cast(list[nn.ModuleList], module.gate_up):
            if len(parts) > 1 and linear.joins(*parts):
                parts[0] = linear.joined(*cast(Any, parts))
                del parts[1:]
    elif Experts.fits(module):
        packed = partial(linear.layer, bias=None, kernels=linear.kernels)
        return Experts(module, lambda weight: [packed(weight)], packed)
    return linear(cast(Any, module)) if linear.takes(module) else None


def _compute_experts_together(model: nn.Module, *, wanted: bool) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            module.use_kernel(wanted=wanted)


def _replace(module: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    leftovers = Leftovers()
    _replace_children(module, replacement, leftovers)
    leftovers.give_back()


def _replace_children(
    module: nn.Module,
    replacement: Callable[[nn.Module], nn.Module | None],
    leftovers: Leftovers,
    *,
    count_layers: bool = True,
) -> None:
    names = [name for name, _ in module.named_children()]  # which would keep all that it has named
    is_layers = count_layers and isinstance(module, nn.ModuleList) and len(names) > 1
    for name in counted(PACKING, names, len(names)) if is_layers else names:
        child = module.get_submodule(name)
        new = replacement(child)
        if new is None:
            _replace_children(child, replacement, leftovers, count_layers=count_layers and not is_layers)
        else:
            setattr(module, name, new)
            for each in child.modules():
                if isinstance(each, nn.Linear | QuantizedLinear):
                    leftovers.add([*each.parameters(recurse=False), *each.buffers(recurse=False)])
            del child, each


def limit_threads(model: nn.Module) -> None:
    """Makes this process compute in one thread when the model's linear layers are small.

    Threads that meet after every such layer win nothing on an idle machine, and on a busy one each meeting waits for
    the slowest. Call it before the weights are packed. A mixture is as large as its other layers, whatever its experts
    are in.
    """
    of_experts = {id(each) for module in model.modules() if isinstance(module, Experts) for each in module.modules()}
    others = [module for module in model.modules() if id(module) not in of_experts]
    sizes = [module.weight.nbytes for module in others if isinstance(module, nn.Linear)]
    sizes += [module.nbytes for module in others if isinstance(module, QuantizedLinear)]
    if sizes and sum(sizes) / len(sizes) < SMALL_LAYER_BYTES and torch.get_num_threads() > 1:
        logger.info("the model is small: it runs in one thread")
        torch.set_num_threads(1)
