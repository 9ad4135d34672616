"""Rebuilds a model of `transformers` for a device: packs its weights, and makes layers by its spec."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.cpu import CpuModel, layers_kernel
from tgi_server.engine.backends.head import ScreenedHead
from tgi_server.engine.backends.layer import DecoderLayer
from tgi_server.engine.checkpoint.quantized import Experts, QuantizedLinear
from tgi_server.engine.linear import LinearFactory, PackedLinear
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.memory import DeferredFree, forget_pages, low_mmap_threshold
from tgi_server.engine.models.spec import DecoderSpec
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.progress import counted
from tgi_server.loading import PACKING

logger = logging.getLogger(__name__)

# Below this a linear layer is done before a second thread has joined in: some 50 microseconds of memory traffic.
SMALL_LAYER_BYTES = 1 << 20


@low_mmap_threshold()
def optimise(
    model: nn.Module,
    spec: DecoderSpec | None = None,
    variants: Mapping[int, AttentionVariant] | None = None,
    *,
    linear: LinearFactory,
    group: ShardGroup | None = None,
) -> CpuModel | None:
    """Packs the weights of all linear layers for a CPU. Returns the model as one kernel call, where it can be one.

    spec, variants: of a model whose KV blocks are those of the CPU's own attention, and how each layer attends.
    linear: makes the layers that replace torch's. group: the shards of the model, when this is one of them.
    """
    kernel, whole = None, cast(PreTrainedModel, model)
    if spec is not None and variants is not None:
        forget_pages([whole.get_output_embeddings().weight])  # which trials have read
        deferred = DeferredFree()
        made = _made_layers(whole, spec, variants, linear)
        for layers, index, layer in counted(PACKING, made, len(spec.layers)):
            _put(layers, str(index), layer, deferred)
            packed = partial(_packed_linear, linear)
            _replace_children(layer, packed, deferred, count_layers=False)  # the experts of a mixture
        deferred.free()
        if group is None or group.memory is not None:  # otherwise shards meet in Python
            kernel = layers_kernel(spec, list(_layers_of(model)))
        if kernel is not None:
            _screen_head(whole, linear)
    _replace(model, partial(_packed_linear, linear))
    _compute_experts_together(model, wanted=True)
    return None if spec is None or kernel is None else CpuModel.of(whole, spec, kernel, group)


def fuse(
    model: PreTrainedModel,
    spec: DecoderSpec,
    variants: Mapping[int, AttentionVariant],
    fault: Callable[[], str | None],
    linear: LinearFactory,
) -> str | None:
    """Makes the decoder layers of a GPU, and leaves all else as it is. Returns why not, if it does not.

    variants: how each layer attends. fault: computes some tokens, and returns what is wrong with the model; it is asked
    when one layer is made, while the others are as they were. linear: makes the linear layers.
    """
    for number, (layers, index, layer) in enumerate(_made_layers(model, spec, variants, linear)):
        before = layers[index]
        layers[index] = layer
        if number == 0 and (reason := fault()) is not None:
            layers[index] = before
            return reason
    return None


def pack_codes(model: PreTrainedModel, linear: LinearFactory) -> None:
    """Packs the quantised weights of all linear layers for which there are kernels, and leaves all else as it is."""
    _replace(model, lambda module: _packed_linear(linear, module) if isinstance(module, QuantizedLinear) else None)


def unpack(model: PreTrainedModel) -> None:
    """Puts plain linear layers back, for a model that reads its weights itself."""
    _replace(model, lambda module: module.unpacked() if isinstance(module, PackedLinear | QuantizedLinear) else None)
    _compute_experts_together(model, wanted=False)


def _layers_of(model: Any) -> nn.ModuleList:
    """Returns the decoder layers of a model of `transformers`; none for code of another structure."""
    layers = getattr(model.get_decoder(), "layers", None) if hasattr(model, "get_decoder") else None
    return layers if isinstance(layers, nn.ModuleList) else nn.ModuleList()


def _made_layers(
    model: nn.Module, spec: DecoderSpec, variants: Mapping[int, AttentionVariant], linear: LinearFactory
) -> Iterator[tuple[nn.ModuleList, int, DecoderLayer]]:
    """Yields the layers that can be made of those of a model, one by one, each with its place in their list."""
    layers = _layers_of(model)
    if len(layers) != len(spec.layers):
        return
    for index, (own, variant) in enumerate(zip(spec.layers, map(variants.get, range(len(layers))), strict=True)):
        if variant is None or not DecoderLayer.fits(layers[index], own, linear):
            continue
        variant = variant if own.scaling is None else replace(variant, scaling=own.scaling)
        yield layers, index, DecoderLayer(layers[index], spec, own, variant, linear)


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
    deferred = DeferredFree()
    _replace_children(module, replacement, deferred)
    deferred.free()


def _replace_children(
    module: nn.Module,
    replacement: Callable[[nn.Module], nn.Module | None],
    deferred: DeferredFree,
    *,
    count_layers: bool = True,
) -> None:
    names = [name for name, _ in module.named_children()]  # which would keep all that it has named
    is_layers = count_layers and isinstance(module, nn.ModuleList) and len(names) > 1
    for name in counted(PACKING, names, len(names)) if is_layers else names:
        child = module.get_submodule(name)
        new = replacement(child)
        if new is None:
            _replace_children(child, replacement, deferred, count_layers=count_layers and not is_layers)
        else:
            del child
            _put(module, name, new, deferred)


def _put(parent: nn.Module, name: str, new: nn.Module, deferred: DeferredFree) -> None:
    """Puts a module in the place of another, whose weights are freed."""
    old = parent.get_submodule(name)
    setattr(parent, name, new)
    for each in old.modules():
        if isinstance(each, nn.Linear | QuantizedLinear):
            deferred.add([*each.parameters(recurse=False), *each.buffers(recurse=False)])


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
