"""Packs the linear layers of a model of `transformers` for a device, in place, and puts plain ones back."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from tgi_server.engine.checkpoint.quantized import Experts, QuantizedEmbedding, QuantizedLinear
from tgi_server.engine.linear import LinearFactory, PackedLinear
from tgi_server.engine.linear.quantized import PackedQuantizedLinear
from tgi_server.engine.memory import DeferredFree
from tgi_server.engine.progress import counted
from tgi_server.loading import PACKING

# With fewer bytes a linear layer is done before a second thread has joined in: some 50 microseconds of memory traffic.
SMALL_LAYER_BYTES = 1 << 20
# Linear layers, of Mamba, whose weight is multiplied by the module above them.
_READ_FROM_OUTSIDE = {"dt_proj"}


def pack_linears(module: nn.Module, linear: LinearFactory) -> None:
    """Packs the weights of all linear layers in a module for a CPU."""
    for embedding, layer in _replace(module, partial(_packed_linear, linear)):
        pack_embedding(embedding, layer, linear)
    _compute_experts_together(module, wanted=True)


def pack_quantized(model: nn.Module, linear: LinearFactory) -> None:
    """Packs the quantised weights of all linear layers for which there are kernels; other layers stay as they are."""

    def packed(module: nn.Module) -> nn.Module | None:
        return _packed_linear(linear, module) if isinstance(module, QuantizedLinear) else None

    for embedding, layer in _replace(model, packed):
        pack_embedding(embedding, layer, linear)


def unpack(model: nn.Module) -> None:
    """Puts plain linear layers back, for a model that reads its weights itself."""

    def unpacked(module: nn.Module) -> nn.Module | None:
        return module.unpacked() if isinstance(module, PackedLinear | QuantizedLinear) else None

    for embedding, layer in _replace(model, unpacked):
        if layer is not None:
            embedding.tie(layer)
    _compute_experts_together(model, wanted=False)


def has_small_layers(model: nn.Module) -> bool:
    """Returns True if one thread computes the model as fast as several, since its linear layers are small.

    Threads that synchronise after every such layer gain nothing on an idle machine, and on a busy one each time wait
    for the slowest. Call it before the weights are packed. The experts of a mixture do not count, whatever format they
    have.
    """
    of_experts = {
        id(inside) for module in model.modules() if isinstance(module, Experts) for inside in module.modules()
    }
    others = [module for module in model.modules() if id(module) not in of_experts]
    sizes = [module.weight.nbytes for module in others if isinstance(module, nn.Linear | Conv1D)]
    sizes += [module.nbytes for module in others if isinstance(module, QuantizedLinear)]
    return bool(sizes) and sum(sizes) / len(sizes) < SMALL_LAYER_BYTES


def pack_embedding(embedding: QuantizedEmbedding, head: nn.Module | None, linear: LinearFactory) -> None:
    """Makes an embedding read its rows from a packed layer, the head's or its own, if there are kernels for it.

    head: the packed layer with the same weight; None: there is none.
    """
    if not linear.takes(embedding.layer):
        return
    if head is not None and hasattr(head, "rows"):
        embedding.tie(head)
        return
    if linear.quantized_layer is not PackedQuantizedLinear:
        return
    deferred = DeferredFree()
    replace_module(embedding, "own", linear(embedding.layer), deferred)
    deferred.free()


def _packed_linear(linear: LinearFactory, module: nn.Module) -> nn.Module | None:
    if isinstance(module, Experts):  # its layers follow, one by one
        for parts in cast(list[nn.ModuleList], module.gate_up):
            if len(parts) > 1 and linear.merges(*parts):
                parts[0] = linear.merged(*cast(Any, parts))
                del parts[1:]
    elif Experts.fits(module):
        packed = partial(linear.layer, bias=None, kernels=linear.kernels)
        return Experts(module, lambda weight: [packed(weight)], packed)
    return linear(cast(Any, module)) if linear.takes(module) else None


def _compute_experts_together(model: nn.Module, *, wanted: bool) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            module.use_kernel(wanted=wanted)


def _replace(
    module: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]
) -> list[tuple[QuantizedEmbedding, nn.Module | None]]:
    """Replaces layers below a module; `replacement` returns the new one, or None to leave one as it is.

    Returns the quantised embeddings, whose layers stay, each with what has replaced the head that has its layer.
    """
    embeddings = [embedding for embedding in module.modules() if isinstance(embedding, QuantizedEmbedding)]
    of_heads: dict[nn.Module, nn.Module | None] = {embedding.layer: None for embedding in embeddings}

    def replaced(child: nn.Module) -> nn.Module | None:
        new = replacement(child)
        if child in of_heads:
            of_heads[child] = new
        return new

    deferred = DeferredFree()
    _replace_children(module, replaced, deferred)
    deferred.free()
    return [(embedding, of_heads[embedding.layer]) for embedding in embeddings]


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
        if name in _READ_FROM_OUTSIDE:
            continue
        child = module.get_submodule(name)
        if isinstance(child, QuantizedEmbedding):
            continue
        new = replacement(child)
        if new is None:
            _replace_children(child, replacement, deferred, count_layers=count_layers and not is_layers)
        else:
            del child
            replace_module(module, name, new, deferred)


def replace_module(parent: nn.Module, name: str, new: nn.Module, deferred: DeferredFree) -> None:
    """Replaces a module by another one, and frees its weights."""
    old = parent.get_submodule(name)
    parent.set_submodule(name, new)
    for module in old.modules():
        if isinstance(module, nn.Linear | Conv1D | QuantizedLinear):
            deferred.add(module.parameters(recurse=False))
        if isinstance(module, QuantizedLinear):
            deferred.add(module.quantized.tensors())
