"""Fills a spec with the weights of a model of `transformers`, packed for a device."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.build_layer import build_layer, check_layers, in_parallel
from tgi_server.engine.backends.decoder import Decoder, DecoderInputs, Norm, Unfit, inner
from tgi_server.engine.backends.head import PrefilteredHead
from tgi_server.engine.backends.pack import pack_embedding, replace_module
from tgi_server.engine.backends.rope import RotaryTable
from tgi_server.engine.checkpoint.quantized import QuantizedEmbedding
from tgi_server.engine.linear import LinearFactory, PackedLinear
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.memory import DeferredFree
from tgi_server.engine.models.spec import DecoderSpec
from tgi_server.engine.parallel.layers import VocabParallelEmbedding
from tgi_server.engine.progress import counted
from tgi_server.loading import PACKING

# Modules of Gemma 3n, for its streams of hidden states.
_STREAMS, _STREAMS_BACK = "altup_projections", "altup_unembed_projections"


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

    variants: how layers report that they attend. linear: makes linear layers. pack: packs those of a mixture of
    experts.
    embedding, head: those of another model, if this model shares them.

    Raises Unfit before anything has changed.
    """
    modules = layers_of(model, spec)
    mixers = check_layers(modules, spec, linear)
    own_embedding = model.get_input_embeddings() if embedding is None else None
    _check_ends(own_embedding, model.get_output_embeddings() if head is None else None, linear)
    decoder = decoder_of(model)
    norms = [Norm.of(decoder.get_submodule(name)) if name else None for name in (spec.embedding_norm, spec.final_norm)]
    deferred, made = DeferredFree(), []
    for index, layer in enumerate(counted(PACKING, spec.layers, len(spec.layers))):
        made.append(build_layer(modules[index], index, layer, variants.get(index), mixers[index], linear))
        for name in (*layer.up, layer.down) if layer.shared else ():
            replace_module(modules[index], name, nn.Identity(), deferred)
        replace_module(modules, str(index), nn.Identity(), deferred)
        if layer.mixture:
            pack(made[-1].mixture, linear)
    deferred.free()
    positions = decoder.get_submodule(spec.positions) if spec.positions else None
    others = _others(model, decoder, spec, linear)
    paths = {id(module): path for path, module in model.named_modules()}
    own_head = model.get_output_embeddings()
    new_head = _head(model, linear) if head is None else head
    if embedding is None:
        embedding = _embedding(own_embedding, own_head, new_head, linear)
    return Decoder(
        spec,
        embedding=embedding,
        positions=None if positions is None else positions.weight[getattr(positions, "offset", 0) :],
        embedding_norm=norms[0],
        ropes=[RotaryTable(getattr(decoder, spec.rotary, None), rope) for rope in spec.ropes],
        layers=made,
        norm=norms[1],
        head=new_head,
        layers_path=paths[id(modules)],
        head_path=paths.get(id(own_head), ""),
        inputs=_inputs(decoder, spec, others, linear),
        streams=(_within(others, _STREAMS), _within(others, _STREAMS_BACK)) if spec.altup else None,
        others=others,
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
        replace_module(model, path, nn.Identity(), deferred)
    deferred.free()
    return made


def _within(linears: Mapping[str, PackedLinear], name: str) -> list[PackedLinear]:
    """Returns the linear layers in the list of that name."""
    return [layer for path, layer in linears.items() if path.split(".")[-2] == name]


def _inputs(
    decoder: nn.Module, spec: DecoderSpec, others: Mapping[str, PackedLinear], linear: LinearFactory
) -> DecoderInputs | None:
    """Returns the modules for further inputs of layers; None if layers have none."""
    if spec.inputs is None:
        return None
    own = spec.inputs
    embedding = _embedding(decoder.get_submodule(own.embedding), None, None, linear)
    projection = next(layer for path, layer in others.items() if path.endswith(f".{own.projection}"))
    return DecoderInputs(own, embedding, projection, Norm.of(decoder.get_submodule(own.norm)))


def decoder_of(model: Any) -> Any:
    """Returns the decoder of a model of `transformers`; Llama 4's causal model names itself as its decoder."""
    decoder = model.get_decoder()
    return decoder.model if decoder is model else decoder


def layers_of(model: Any, spec: DecoderSpec) -> nn.ModuleList:
    """Returns the decoder layers of a model of `transformers`; none for code of another structure."""
    layers = getattr(decoder_of(model), spec.layer_list, None) if hasattr(model, "get_decoder") else None
    return layers if isinstance(layers, nn.ModuleList) else nn.ModuleList()


def _check_ends(embedding: Any, head: Any, linear: LinearFactory) -> None:
    """Raises Unfit for an embedding or a head without a kernel; None: it is another model's."""
    plain = embedding.inner if isinstance(embedding, VocabParallelEmbedding) else embedding
    fits = isinstance(plain, nn.Embedding) or (isinstance(plain, QuantizedEmbedding) and linear.takes(plain.layer))
    if not (embedding is None or fits) or not (head is None or linear.takes(inner(head))):
        raise Unfit("its head or its embedding is of another kind")


def _embedding(
    module: Any, head: Any, new_head: Any, linear: LinearFactory
) -> nn.Embedding | QuantizedEmbedding | VocabParallelEmbedding:
    """Returns an embedding without the scaling that some embeddings of `transformers` apply.

    head, new_head: the model's head and its replacement, with which a quantised embedding may share its weight.
    """
    if isinstance(module, VocabParallelEmbedding):
        own = _embedding(module.inner, head, new_head, linear)
        return VocabParallelEmbedding(own, module.group, module.share)
    if isinstance(module, QuantizedEmbedding):
        pack_embedding(module, inner(new_head) if module.layer is inner(head) else None, linear)
        return module.unscaled()
    plain = nn.Embedding.from_pretrained(module.weight)  # unlike the constructor, it makes no random numbers
    plain.weight = module.weight
    return plain


def _head(model: PreTrainedModel, linear: LinearFactory) -> Any:
    """Returns the head, which replaces the model's own: drafters may use it, too."""
    own: Any = model.get_output_embeddings()
    plain = type(own) is nn.Linear and own.bias is None
    if plain and linear.layer is FloatLinear and PrefilteredHead.pays(own.weight):
        head: Any = PrefilteredHead(own.weight, None, linear.kernels)
        head.tied = own.weight is model.get_input_embeddings().weight
    else:
        head = in_parallel(own, linear)
    model.set_output_embeddings(head)
    return head
