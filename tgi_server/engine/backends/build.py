"""Fills a spec with the weights of a model of `transformers`, packed for a device; or packs that model's own layers."""

import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tgi_server.engine.backends.alibi import slopes_of
from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.attention.latents import latents_of
from tgi_server.engine.backends.decoder import (
    AltUpLayer,
    AttentionHeads,
    Decoder,
    DecoderInputs,
    DecoderLayer,
    LatentLayers,
    Norm,
    Unfit,
    inner,
)
from tgi_server.engine.backends.head import PrefilteredHead
from tgi_server.engine.backends.mixer_kernels import MixerKernel
from tgi_server.engine.backends.rope import RotaryTable
from tgi_server.engine.checkpoint.quantized import Experts, QuantizedEmbedding, QuantizedLinear
from tgi_server.engine.checkpoint.quantized.layer import plain_linear
from tgi_server.engine.linear import LinearFactory, PackedLinear
from tgi_server.engine.linear.blas import BlasLinear
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.linear.quantized import PackedQuantizedLinear
from tgi_server.engine.memory import HOST, DeferredFree
from tgi_server.engine.models.spec import DecoderSpec, LayerSpec
from tgi_server.engine.parallel.layers import RowParallel, ShardedLayer, VocabParallelEmbedding, VocabParallelHead
from tgi_server.engine.progress import counted
from tgi_server.loading import PACKING

logger = logging.getLogger(__name__)

# The norms of LayerSpec, in the order of a layer's steps.
_NORMS = (
    *("attention_norm", "token_norm", "query_norm", "key_norm", "value_norm", "attended_norm", "feed_forward_norm"),
    *("mixture_norm", "router_norm", "mixed_norm", "shared_norm", "fed_norm", "input_norm"),
)
# The norms that a layer without attention has not, of heads.
_OF_ATTENTION = ("query_norm", "key_norm", "value_norm")
# Modules of Gemma 3n, for its streams of hidden states: of the model, and linear layers of a layer.
_STREAMS, _STREAMS_BACK = "altup_projections", "altup_unembed_projections"
_OF_ALTUP = (
    *("altup.modality_router", "altup.prediction_coefs", "altup.correction_coefs"),
    *("laurel.linear_left", "laurel.linear_right"),
)
# Below this a linear layer is done before a second thread has joined in: some 50 microseconds of memory traffic.
SMALL_LAYER_BYTES = 1 << 20
# Linear layers, of Mamba, whose weight is multiplied by the module above them.
_READ_FROM_OUTSIDE = {"dt_proj"}


def build_decoder(
    model: PreTrainedModel,
    spec: DecoderSpec,
    variants: Mapping[int, AttentionVariant],
    linear: LinearFactory,
    pack: Callable[[nn.Module, LinearFactory], None],
    embedding: Any = None,
    head: Any = None,
) -> Decoder:
    """Fills a spec with the weights of a model of `transformers`, whose layers are emptied one by one.

    variants: how layers say that they attend. linear: makes linear layers. pack: packs those of a mixture of experts.
    embedding, head: of another model, where it uses that one's.

    Raises Unfit before anything has changed.
    """
    modules = layers_of(model, spec)
    mixers = _check(modules, spec, linear)
    _check_ends(model.get_input_embeddings() if embedding is None else None,
                model.get_output_embeddings() if head is None else None, linear)  # fmt: skip
    decoder = decoder_of(model)
    norms = [Norm.of(decoder.get_submodule(name)) if name else None for name in (spec.embedding_norm, spec.final_norm)]
    deferred, made = DeferredFree(), []
    for index, layer in enumerate(counted(PACKING, spec.layers, len(spec.layers))):
        made.append(_layer(modules[index], index, layer, variants.get(index), mixers[index], linear))
        for name in (*layer.up, layer.down) if layer.shared else ():
            _put(modules[index], name, nn.Identity(), deferred)
        _put(modules, str(index), nn.Identity(), deferred)
        if layer.mixture:
            pack(made[-1].mixture, linear)
    deferred.free()
    positions = decoder.get_submodule(spec.positions) if spec.positions else None
    others = _others(model, decoder, spec, linear)
    paths = {id(module): path for path, module in model.named_modules()}
    own_head = model.get_output_embeddings()
    new_head = _head(model, linear) if head is None else head
    return Decoder(
        spec,
        _embedding(model.get_input_embeddings(), own_head, new_head, linear) if embedding is None else embedding,
        None if positions is None else positions.weight[getattr(positions, "offset", 0) :],
        norms[0],
        [RotaryTable(getattr(decoder, spec.rotary, None), each) for each in spec.ropes],
        made,
        norms[1],
        new_head,
        paths[id(modules)],
        paths.get(id(own_head), ""),
        _inputs(decoder, spec, others, linear),
        (_within(others, _STREAMS), _within(others, _STREAMS_BACK)) if spec.altup else None,
        others,
    )


def _others(model: nn.Module, decoder: nn.Module, spec: DecoderSpec, linear: LinearFactory) -> dict[str, PackedLinear]:
    """Returns the linear layers outside of layers, by their paths; the model does not keep them."""
    names = [] if spec.inputs is None else [spec.inputs.projection]
    if spec.altup:
        lists = ((name, cast(nn.ModuleList, decoder.get_submodule(name))) for name in (_STREAMS, _STREAMS_BACK))
        names += [f"{name}.{index}" for name, modules in lists for index in range(len(modules))]
    prefix = next(path for path, module in model.named_modules() if module is decoder)
    made: dict[str, PackedLinear] = {}
    deferred = DeferredFree()
    for path in (f"{prefix}.{name}" for name in names):
        made[path] = linear(cast(Any, model.get_submodule(path)))
        _put(model, path, nn.Identity(), deferred)
    deferred.free()
    return made


def _within(linears: Mapping[str, PackedLinear], name: str) -> list[PackedLinear]:
    """Returns those of a list of that name."""
    return [each for path, each in linears.items() if path.split(".")[-2] == name]


def _inputs(
    decoder: nn.Module, spec: DecoderSpec, others: Mapping[str, PackedLinear], linear: LinearFactory
) -> DecoderInputs | None:
    """Returns what makes the further inputs of layers, if there are such."""
    if spec.inputs is None:
        return None
    own = spec.inputs
    embedding = _embedding(decoder.get_submodule(own.embedding), None, None, linear)
    projection = next(each for path, each in others.items() if path.endswith(f".{own.projection}"))
    return DecoderInputs(own, embedding, projection, Norm.of(decoder.get_submodule(own.norm)))


def _altup(layer: nn.Module, linear: LinearFactory) -> AltUpLayer:
    altup: Any = layer.get_submodule("altup")
    norms = Norm.of(altup.router_norm), Norm.of(layer.get_submodule("laurel.post_laurel_norm"))
    scale = altup.correct_output_scale.float() if altup.config.altup_correct_scale else None
    return AltUpLayer({name: linear(_linear(layer, name)) for name in _OF_ALTUP}, *norms, scale)


def pack_linears(module: nn.Module, linear: LinearFactory) -> None:
    """Packs the weights of all linear layers in a module for a CPU."""
    for embedding, layer in _replace(module, partial(_packed_linear, linear)):
        _pack_embedding(embedding, layer, linear)
    _compute_experts_together(module, wanted=True)


def pack_quantized(model: nn.Module, linear: LinearFactory) -> None:
    """Packs the quantised weights of all linear layers for which there are kernels, and leaves all else as it is."""

    def packed(module: nn.Module) -> nn.Module | None:
        return _packed_linear(linear, module) if isinstance(module, QuantizedLinear) else None

    for embedding, layer in _replace(model, packed):
        _pack_embedding(embedding, layer, linear)


def unpack(model: nn.Module) -> None:
    """Puts plain linear layers back, for a model that reads its weights itself."""

    def unpacked(module: nn.Module) -> nn.Module | None:
        return module.unpacked() if isinstance(module, PackedLinear | QuantizedLinear) else None

    for embedding, layer in _replace(model, unpacked):
        if layer is not None:
            embedding.tie(layer)
    _compute_experts_together(model, wanted=False)


def decoder_of(model: Any) -> Any:
    """Returns the decoder of a model of `transformers`; Llama 4's causal model takes itself for it."""
    decoder = model.get_decoder()
    return decoder.model if decoder is model else decoder


def layers_of(model: Any, spec: DecoderSpec) -> nn.ModuleList:
    """Returns the decoder layers of a model of `transformers`; none for code of another structure."""
    layers = getattr(decoder_of(model), spec.layer_list, None) if hasattr(model, "get_decoder") else None
    return layers if isinstance(layers, nn.ModuleList) else nn.ModuleList()


def _check(modules: nn.ModuleList, spec: DecoderSpec, linear: LinearFactory) -> list[MixerKernel | None]:
    """Raises Unfit for a model that its spec does not describe. Returns the kernels of layers with states."""
    if len(modules) != len(spec.layers):
        raise Unfit(f"it has {len(modules)} layers, where its spec has {len(spec.layers)}")
    mixers = []
    for index, (module, layer) in enumerate(zip(modules, spec.layers, strict=True)):
        try:
            mixer = MixerKernel.of(layer.mixer, module, linear) if layer.mixer else None
            mixers.append(mixer)
            if layer.mixer and mixer is None:
                raise Unfit(f"there is no kernel for layer {index}, {layer.mixer.name}")
            parts = [[inner(_linear(module, name)) for name in names] for names in _linear_names(layer).values()]
            mixture = module.get_submodule(layer.mixture.name) if layer.mixture else None
            _norms(module, layer)
        except AttributeError as error:
            raise Unfit(f"layer {index}: {error}") from error
        mixed = mixture is None or hasattr(mixture, "experts")
        if not mixed or not all(linear.joins(*each) if len(each) > 1 else linear.takes(*each) for each in parts):
            raise Unfit(f"layer {index} is made of other parts than its spec says")
    return mixers


def _check_ends(embedding: Any, head: Any, linear: LinearFactory) -> None:
    """Raises Unfit for an embedding or a head without a kernel; None: it is another model's."""
    plain = embedding.inner if isinstance(embedding, VocabParallelEmbedding) else embedding
    fits = isinstance(plain, nn.Embedding) or (isinstance(plain, QuantizedEmbedding) and linear.takes(plain.layer))
    if not (embedding is None or fits) or not (head is None or linear.takes(inner(head))):
        raise Unfit("its head or its embedding is of another kind")


def _layer(
    module: nn.Module,
    number: int,
    spec: LayerSpec,
    variant: AttentionVariant | None,
    mixer: MixerKernel | None,
    linear: LinearFactory,
) -> DecoderLayer:
    """Returns a layer with the weights of one of `transformers`; those of a mixture are not packed yet."""
    linears: dict[str, Any] = {}
    parts: dict[str, list[tuple[str, int]]] = {}
    scales: dict[str, Tensor] = {}
    for part, names in _linear_names(spec).items():
        own = [_linear(module, name) for name in names]
        parts[part] = [(name, _outputs(each)) for name, each in zip(names, own, strict=True)]
        linears[part] = _joined(own, linear)
        if spec.scales.keys() & set(names):
            scales[part] = torch.cat([_scales(module, spec, *each) for each in parts[part]])
    heads, latents = None, None
    if spec.attends and spec.attention is not None:
        attention = module.get_submodule(spec.attention)
        index = linears["index_key"].out_features if "index_key" in linears else 0
        latents = _latents(attention, index) if spec.latents else None
        heads = _heads(attention, spec, linears) if latents is None else _heads_of(latents)
        variant = _variant(attention, spec, heads, variant)
    else:
        variant = None
    return DecoderLayer(
        spec,
        number,
        linears,
        parts,
        scales,
        _norms(module, spec),
        heads=heads,
        variant=variant,
        latents=latents,
        mixer=mixer,
        mixture=_mixture(module, spec),
        scale=1.0 if spec.output_scale is None else float(module.get_buffer(spec.output_scale)),
        altup=_altup(module, linear) if hasattr(module, "altup") else None,
    )


def _norms(module: nn.Module, spec: LayerSpec) -> dict[str, Norm]:
    """Returns the norms that a layer has, by their names in the spec."""
    norms: dict[str, Norm] = {}
    size = _head_size(module.get_submodule(spec.attention)) if spec.attends and spec.attention else 1
    for kind, name in _norm_names(spec).items():
        whole = norms["attention_norm"].size if "attention_norm" in norms else 1
        norms[kind] = Norm.of(module.get_submodule(name), size if kind in _OF_ATTENTION else whole)
    if spec.mixture and spec.mixture.router_scale:
        scale, norm = operator.attrgetter(spec.mixture.router_scale)(module).float(), norms["router_norm"]
        norms["router_norm"] = replace(norm, weight=norm.weight.float() * scale * len(scale) ** -0.5)
    return norms


def _mixture(layer: nn.Module, spec: LayerSpec) -> Any:
    """Returns a layer's mixture, whose experts say what `Experts` asks of them; None if it has none."""
    if spec.mixture is None:
        return None
    mixture: Any = layer.get_submodule(spec.mixture.name)
    if mixture is layer:
        router = spec.mixture.router.partition(".")[0]
        mixture = nn.ModuleDict({name: layer.get_submodule(name) for name in ("experts", router)})
    experts = inner(mixture.experts)
    if spec.mixture.share_inputs and not isinstance(experts, Experts):  # of Llama 4, which take other inputs
        experts.has_gate, experts.is_transposed = True, True
        experts._apply_gate = partial(_gated, experts.act_fn)
        plain = Experts(experts, lambda weight: [plain_linear(weight, None)], lambda weight: plain_linear(weight, None))
        mixture.set_submodule("experts.inner" if isinstance(mixture.experts, RowParallel) else "experts", plain)
    return mixture


def _gated(activation: Callable[[Tensor], Tensor], joined: Tensor) -> Tensor:
    gate, up = joined.chunk(2, -1)
    return activation(gate) * up


def _scales(module: nn.Module, spec: LayerSpec, name: str, outputs: int) -> Tensor:
    """Returns what the outputs of a linear layer are multiplied by, [outputs] float32."""
    scale = spec.scales.get(name, 1.0)
    if isinstance(scale, tuple):
        return scale[0] * module.get_buffer(scale[1]).float().flatten()
    return torch.full((outputs,), scale)


def _head_size(attention: Any) -> int:
    return int(getattr(attention, "head_dim", 0) or getattr(attention, "head_size", 1))


def _heads(attention: Any, spec: LayerSpec, linears: Mapping[str, Any]) -> AttentionHeads:
    size = _head_size(attention)
    of_value = int(getattr(attention, "v_head_dim", size))
    heads = inner(linears["output"]).in_features // of_value
    queries = 2 * heads if spec.gated else heads
    return AttentionHeads(heads, (linears["qkv"].out_features - queries * size) // (size + of_value), size, of_value)


def _variant(
    attention: nn.Module, spec: LayerSpec, heads: AttentionHeads, said: AttentionVariant | None
) -> AttentionVariant:
    """Returns how a layer attends. said: what it says when it calls attention; None: it does not call it."""
    variant = said or AttentionVariant(scaling=heads.size**-0.5)
    scaling = variant.scaling if spec.scaling is None else spec.scaling
    variant = replace(
        variant,
        scaling=scaling,
        chunk=spec.chunk,
        window=spec.window or variant.window,
        chosen=spec.index.tokens if spec.index else 0,
    )
    if spec.alibi is None:
        return variant
    slopes = slopes_of(attention, heads.heads, spec.alibi).to(next(attention.parameters()).device)
    return replace(variant, alibi_slopes=slopes, rounded_alibi=spec.alibi == "rounded")


def _latents(attention: Any, index: int) -> LatentLayers:
    weights = latents_of(attention)
    on_cpu = weights.keys.device == HOST and FloatLinear.supports(weights.keys.dtype)
    kind = FloatLinear if on_cpu else BlasLinear
    keys, values = ([kind(each.contiguous()) for each in part.mT] for part in (weights.keys, weights.values))
    return LatentLayers(int(attention.qk_rope_head_dim), keys, values, index)


def _heads_of(latents: LatentLayers) -> AttentionHeads:
    """Returns the heads as the cache has them: one of keys, which are values, too."""
    size = latents.rotated + latents.keys[0].out_features
    return AttentionHeads(len(latents.keys), 1, size, size)


def _linear(layer: nn.Module, name: str) -> Any:
    """Returns a linear layer of a layer of `transformers`, which may have kinds of its own, as one of torch's."""
    module = layer.get_submodule(name)
    own = inner(module)
    if isinstance(own, Conv1D):
        own = plain_linear(own.weight.t(), own.bias)
    elif isinstance(own, nn.Linear) and type(own) is not nn.Linear:
        own = plain_linear(own.weight, own.bias)
    return type(module)(own, module.group, module.share) if isinstance(module, RowParallel) else own


def _outputs(module: Any) -> int:
    """Returns the number of a linear layer's outputs, or of those that this shard has."""
    linear = inner(module)
    return int(linear.out_features) if isinstance(linear, QuantizedLinear) else len(linear.weight)


def _linear_names(spec: LayerSpec) -> dict[str, tuple[str, ...]]:
    """Returns the names in `transformers` of what each linear layer is made of."""
    names: dict[str, tuple[str, ...]] = {}
    if spec.attends:
        names = {"qkv": spec.qkv, "output": (spec.output,)} | ({"query": (spec.query,)} if spec.query else {})
        if spec.index is not None and not spec.index.shared:
            index = spec.index
            names |= {"index_query": (index.query,), "index_key": (index.key,), "index_weights": (index.weights,)}
    if (mixer := spec.mixer) is not None:
        names |= {
            "mixer_in": tuple(f"{mixer.name}.{name}" for name in mixer.projections),
            "mixer_out": (f"{mixer.name}.{mixer.output}",),
        }
    if spec.up and (spec.mixture is None or spec.shared):
        names |= {"up": spec.up, "down": (spec.down,)}
    others = {name: getattr(spec, name) for name in ("shared_gate", "input_gate", "input_projection")}
    return names | {name: (path,) for name, path in others.items() if path}


def _norm_names(spec: LayerSpec) -> dict[str, str]:
    """Returns the names in `transformers` of the norms that there are, by those in the spec."""
    norms = {kind: name for kind in _NORMS if (name := getattr(spec, kind)) is not None}
    if spec.index is not None and not spec.index.shared:
        norms["index_norm"] = spec.index.norm
    return norms if spec.attends else {kind: name for kind, name in norms.items() if kind not in _OF_ATTENTION}


def _joined(modules: list[Any], linear: LinearFactory) -> PackedLinear | RowParallel:
    """Returns one layer for linear layers with the same input."""
    return linear.joined(*modules) if len(modules) > 1 else _in_parallel(modules[0], linear)


def _in_parallel(module: Any, linear: LinearFactory) -> Any:
    """Returns the layer that replaces a linear layer; if that was inside a parallel layer, inside a new one."""
    if not isinstance(module, ShardedLayer):
        return linear(module)
    made = type(module)(linear(module.inner), module.group, module.share)
    if isinstance(module, VocabParallelHead):
        cast(VocabParallelHead, made).vocab_size = module.vocab_size
    return made


def _embedding(
    module: Any, head: Any, new_head: Any, linear: LinearFactory
) -> nn.Embedding | QuantizedEmbedding | VocabParallelEmbedding:
    """Returns an embedding without the scaling that some embeddings of `transformers` apply.

    head, new_head: the model's head, and what has replaced it, which a quantised embedding may be in.
    """
    if isinstance(module, VocabParallelEmbedding):
        own = _embedding(module.inner, head, new_head, linear)
        return VocabParallelEmbedding(own, module.group, module.share)
    if isinstance(module, QuantizedEmbedding):
        _pack_embedding(module, inner(new_head) if module.layer is inner(head) else None, linear)
        return module.unscaled()
    plain = nn.Embedding.from_pretrained(module.weight)  # unlike the constructor, it makes no random numbers
    plain.weight = module.weight
    return plain


def _pack_embedding(embedding: QuantizedEmbedding, head: nn.Module | None, linear: LinearFactory) -> None:
    """Has an embedding look its rows up in a packed layer, if there are kernels for it: the head's or its own.

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
    _put(embedding, "own", linear(embedding.layer), deferred)
    deferred.free()


def _head(model: PreTrainedModel, linear: LinearFactory) -> Any:
    """Returns the head, which replaces the model's own: drafters may use it, too."""
    own: Any = model.get_output_embeddings()
    plain = type(own) is nn.Linear and own.bias is None
    if plain and linear.layer is FloatLinear and PrefilteredHead.pays(own.weight):
        head: Any = PrefilteredHead(own.weight, None, linear.kernels)
        head.tied = own.weight is model.get_input_embeddings().weight
    else:
        head = _in_parallel(own, linear)
    model.set_output_embeddings(head)
    return head


def _packed_linear(linear: LinearFactory, module: nn.Module) -> nn.Module | None:
    if isinstance(module, Experts):  # whose other layers follow, one by one
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
    embeddings = [each for each in module.modules() if isinstance(each, QuantizedEmbedding)]
    of_heads: dict[nn.Module, nn.Module | None] = {each.layer: None for each in embeddings}

    def replaced(child: nn.Module) -> nn.Module | None:
        new = replacement(child)
        if child in of_heads:
            of_heads[child] = new
        return new

    deferred = DeferredFree()
    _replace_children(module, replaced, deferred)
    deferred.free()
    return [(each, of_heads[each.layer]) for each in embeddings]


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
            _put(module, name, new, deferred)


def _put(parent: nn.Module, name: str, new: nn.Module, deferred: DeferredFree) -> None:
    """Puts a module in the place of another, whose weights are freed."""
    old = parent.get_submodule(name)
    parent.set_submodule(name, new)
    for each in old.modules():
        if isinstance(each, nn.Linear | Conv1D | QuantizedLinear):
            deferred.add([*each.parameters(recurse=False), *each.buffers(recurse=False)])


def has_small_layers(model: nn.Module) -> bool:
    """Returns True if one thread computes the model as fast as several, since its linear layers are small.

    Threads that meet after every such layer win nothing on an idle machine, and on a busy one each meeting waits for
    the slowest. Call it before the weights are packed. A mixture is as large as its other layers, whatever its experts
    are in.
    """
    of_experts = {id(each) for module in model.modules() if isinstance(module, Experts) for each in module.modules()}
    others = [module for module in model.modules() if id(module) not in of_experts]
    sizes = [module.weight.nbytes for module in others if isinstance(module, nn.Linear | Conv1D)]
    sizes += [module.nbytes for module in others if isinstance(module, QuantizedLinear)]
    return bool(sizes) and sum(sizes) / len(sizes) < SMALL_LAYER_BYTES
