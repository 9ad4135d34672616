"""Builds and loads one shard of a model, or a whole one whose weights are quantised."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.pytorch_utils import Conv1D

from tgi_server.engine.checkpoint.quantized import Experts, Quantization, QuantizedEmbedding, QuantizedLinear
from tgi_server.engine.checkpoint.safetensors_files import Checkpoint, QuantizedTensor, SlicedTensor, open_checkpoint
from tgi_server.engine.checkpoint.weight_files import EXPERT
from tgi_server.engine.errors import InvalidWeights, UnsupportedModel
from tgi_server.engine.memory import HOST
from tgi_server.engine.models.families import plan_for
from tgi_server.engine.parallel.group import ShardGroup
from tgi_server.engine.parallel.layers import VocabParallelHead
from tgi_server.engine.parallel.plan import ShardingPlan
from tgi_server.engine.parallel.shares import Share, share_of, vocabulary
from tgi_server.engine.progress import counted
from tgi_server.loading import READING, ROUNDING

T = TypeVar("T")

# Names that attention modules of `transformers` have for the number of heads that they compute.
_QUERY_COUNTS = ("num_heads", "n_heads", "num_attention_heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
# The layer that a path or a name is of; and what an expert's layers for gate, up and down are called in checkpoints.
_LAYER = re.compile(r"\blayers\.\d+\b")
_EXPERT_NAMES = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))
# Weights that stay quantised, each with the paths of the linear layers that it fills: one, or one for each expert.
_Kept = list[tuple[QuantizedTensor, list[str]]]


class LocalConfig:
    """A model's configuration as one of its attention modules sees it: with the heads of this shard."""

    def __init__(self, config: PretrainedConfig, share: Share) -> None:
        self._config = config
        self.num_attention_heads = len(share.queries)
        self.num_key_value_heads = len(share.keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def load_shard(
    folder: Path,
    config: PretrainedConfig,
    factory: Any,
    dtype: torch.dtype,
    device: torch.device,
    group: ShardGroup,
    *,
    quantization: Quantization | None,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Loads this shard of the model in a folder. Returns it with what `transformers` reports of loading it.

    Nothing but the shard is ever in memory, and one quantised weight. config: the model's. quantization: of its
    weights. Raises UnsupportedModel for a model that cannot be split over this many shards.
    """
    plan = plan_for(config)
    share = share_of(group.rank, group.world_size, plan.heads)
    model, report = _load(folder, config, factory, dtype, device, plan, share, quantization, trust_remote_code)
    surround(model, plan, share, group, config)
    return model, report


def load_tensors(
    folder: Path,
    config: PretrainedConfig,
    factory: Any,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None,
    *,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Loads a whole model of the tensors in its files, quantised ones as such, and of nothing else in its folder.

    Returns it with what `transformers` reports of loading it.
    """
    return _load(folder, config, factory, dtype, device, None, None, quantization, trust_remote_code)


def _load(
    folder: Path,
    config: PretrainedConfig,
    factory: Any,
    dtype: torch.dtype,
    device: torch.device,
    plan: ShardingPlan | None,
    share: Share | None,
    quantization: Quantization | None,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    for part in (config, config.get_text_config(decoder=True)):  # or transformers would want to read them
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    with torch.device("meta"), _blank_embeddings():
        empty = factory.from_config(config, trust_remote_code=trust_remote_code)
    _leave_out_images(empty)
    model_class, config = type(empty), empty.config  # of the text model, where it is loaded without its images
    with open_checkpoint(folder, plan, share, quantization) as tensors:
        if plan is not None:
            _check_vocabulary(empty, tensors, plan)
        by_name = by_model_names(get_model_conversion_mapping(empty), tensors)
        experts = _experts(empty, by_name)
        linears, embeddings = _linears(empty, by_name), _embeddings(empty, by_name)
        tied = _tied(empty, by_name) is not None
        part_class = _part_class(model_class, plan, share, linears, embeddings, experts, tied=tied)
        kept = [*linears, *embeddings, *(each for of_layer in experts.values() for each in of_layer)]
        taken = {id(tensor) for tensor, _ in kept}
        rest = {name: tensor for name, tensor in tensors.items() if id(tensor) not in taken}
        with _blank_embeddings():
            model, report = part_class.from_pretrained(
                None,
                config=config,
                state_dict=rest,
                dtype=dtype,
                device_map=placement(device),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
            )
        stage = ROUNDING if quantization and quantization.rounds else READING
        for tensor, paths in counted(stage, kept, len(kept)):
            _check_shape(folder, tensor, [model.get_submodule(path) for path in paths])
            for path, weight in zip(paths, tensor.weights(), strict=True):
                layer = model.get_submodule(path)
                layer.fill(weight)
                layer.to(device)
    model.__class__ = model_class  # which can be imported, unlike its subclass that built the shard
    model.name_or_path = model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model, report


@contextmanager
def _blank_embeddings() -> Iterator[None]:
    """Embeddings are made without random numbers, for which torch would import sympy while they are on no device."""
    embedding: Any = nn.Embedding
    fill = embedding.reset_parameters
    embedding.reset_parameters = _leave_blank
    try:
        yield
    finally:
        embedding.reset_parameters = fill


def _leave_blank(_: nn.Embedding) -> None:
    pass


def load_without_text(
    folder: Path,
    config: PretrainedConfig,
    model_class: type[PreTrainedModel],
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Loads the parts of a model that read images. Returns them with what `transformers` reports of loading them.

    config: the model's, which is changed.
    """
    config.tie_word_embeddings = False  # of a head and embeddings that are not there

    class WithoutText(model_class):
        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            _leave_out_text(self)

    WithoutText.__name__ = model_class.__name__
    WithoutText.__module__ = model_class.__module__
    with open_checkpoint(folder, None, None, quantization) as tensors:
        model, report = WithoutText.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=dtype,
            device_map=placement(device),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    return model, report


def _check_shape(folder: Path, tensor: QuantizedTensor, layers: list[Any]) -> None:
    """Raises InvalidWeights for a tensor that is not of the shape that the layers have which it fills."""
    wanted = (layers[0].out_features, layers[0].in_features)
    if tensor.stacked:
        wanted = (len(layers), *reversed(wanted))
    if tensor.shape != wanted:
        raise InvalidWeights(
            f"{folder}: the tensors of {tensor.name} are of the shape {list(tensor.shape)}, where config.json requires "
            f"{list(wanted)}"
        )


def placement(device: torch.device) -> dict[str, torch.device] | None:
    """Returns the `device_map` with which `transformers` puts each weight on the device as soon as it is read.

    On a CPU weights may stay where they are: in the pages of their files.
    """
    return None if device == HOST else {"": device}


def _check_vocabulary(model: PreTrainedModel, tensors: Checkpoint, plan: ShardingPlan) -> None:
    """Raises InvalidWeights for a tensor of another number of tokens than config.json says.

    The slices of shards are as long as the longest, so that they may fit where the whole tensor does not.
    """
    for name, parameter in model.state_dict().items():
        slice_, tensor = plan.slice(name), tensors.get(name)
        if slice_ is None or slice_.layout is not vocabulary or not isinstance(tensor, SlicedTensor):
            continue
        if (shape := tensor.whole_shape) != tuple(parameter.shape):
            raise InvalidWeights(
                f"shapes differ from config.json: {name} is {list(shape)}, not {list(parameter.shape)}"
            )


def _linears(model: PreTrainedModel, tensors: Checkpoint) -> _Kept:
    """Returns the weights of linear layers that stay quantised.

    Weights of other layers, and weights that `transformers` converts, become dense as they are read. The head
    is not rounded.
    """
    head = model.get_output_embeddings()
    found: _Kept = []
    for path, module in model.named_modules():
        tensor = _named(model, tensors, f"{path}.weight")
        if module is head and tensor is None:
            tensor = _tied(model, tensors)
        if isinstance(tensor, QuantizedTensor) and not tensor.stacked:
            if type(module) is nn.Linear and not (tensor.plain and module is head):
                found.append((tensor, [path]))
            tensor.transposed = type(module) is Conv1D
    return found


def _tied(model: PreTrainedModel, tensors: Checkpoint) -> QuantizedTensor | None:
    """Returns the weight of the head and of the embedding that share it, if it stays quantised."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight or not _may_stay_quantized(model, embedding):
        return None
    paths = {module: path for path, module in model.named_modules()}
    if _named(model, tensors, f"{paths[head]}.weight") is not None:
        return None
    tensor = _named(model, tensors, f"{paths[embedding]}.weight")
    return tensor if isinstance(tensor, QuantizedTensor) and tensor.plain is None else None


def _embeddings(model: PreTrainedModel, tensors: Checkpoint) -> _Kept:
    """Returns the weights of embeddings that stay quantised, with the paths of the linear layers that have them.

    That is the head where it has the same weight, which it is read for, or else a layer of the embedding's own.
    """
    tied, found = _tied(model, tensors), []
    for path, module in model.named_modules():
        tensor = _named(model, tensors, f"{path}.weight") if _may_stay_quantized(model, module) else None
        if isinstance(tensor, QuantizedTensor) and tensor.plain is None and tensor is not tied:
            found.append((tensor, [f"{path}.own"]))
    return found


def _may_stay_quantized(model: PreTrainedModel, embedding: nn.Module) -> bool:
    return QuantizedEmbedding.fits(embedding) and not model.config.is_encoder_decoder


def _experts(model: PreTrainedModel, tensors: Checkpoint) -> dict[str, _Kept]:
    """Returns the weights of experts that stay quantised, by the path of each layer's experts.

    Where one of a layer's is missing, is not quantised or has another name, they become dense as they are read.
    """
    apart: dict[tuple[str, str, int], QuantizedTensor] = {}
    for name, tensor in tensors.items():
        layer, expert = _LAYER.search(name), EXPERT.fullmatch(name)
        if layer and expert and isinstance(tensor, QuantizedTensor):
            apart[layer[0], expert[3].removesuffix(".weight"), int(expert[2])] = tensor
    found: dict[str, _Kept] = {}
    for path, module in model.named_modules():
        layer = _LAYER.search(path)
        own: Any = module
        if layer is None or not Experts.fits(module) or not own.has_gate:
            continue
        numbers = range(len(own.down_proj))
        together = [_named(model, tensors, f"{path}.{name}") for name in ("gate_up_proj", "down_proj")]
        stacked = [tensor for tensor in together if isinstance(tensor, QuantizedTensor) and tensor.stacked]
        if len(stacked) == len(together) and own.is_transposed:
            places = [[f"{path}.{place.format(n)}" for n in numbers] for place in ("gate_up.{}.0", "down.{}")]
            found[path] = list(zip(stacked, places, strict=True))
        for names in _EXPERT_NAMES:
            if all((layer[0], name, n) in apart for name in names for n in numbers):
                found[path] = [
                    (apart[layer[0], name, n], [f"{path}.{place.format(n)}"])
                    for n in numbers
                    for name, place in zip(names, ("gate_up.{}.0", "gate_up.{}.1", "down.{}"), strict=True)
                ]
    return found


def by_model_names(changes: Iterable[Any], tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns the tensors by the names in the files, and by those that `transformers` gives them in the model.

    changes: of `get_model_conversion_mapping(model)`. Tensors that it converts as it loads them have no such name.
    """
    names = {file_name: name_in_model(changes, file_name) for file_name in tensors}
    return {name: tensors[file_name] for file_name, name in names.items() if name is not None} | dict(tensors)


def name_in_model(changes: Iterable[Any], file_name: str) -> str | None:
    """Returns the name that `transformers` gives a tensor of a checkpoint; None for one that it converts."""
    name, converted = file_name, False
    for change in changes:
        name, pattern = change.rename_source_key(name)
        converted |= isinstance(change, WeightConverter) and pattern is not None
    return None if converted else name


def _named(model: PreTrainedModel, tensors: Checkpoint, name: str) -> SlicedTensor | QuantizedTensor | None:
    """Returns a tensor of the checkpoint by its name in the model; files may leave out the name of the base model, or
    have it where the model has not.
    """
    prefix = f"{model.base_model_prefix}."
    return tensors.get(name) or tensors.get(name.removeprefix(prefix)) or tensors.get(prefix + name)


def _part_class(
    model_class: type[PreTrainedModel],
    plan: ShardingPlan | None,
    share: Share | None,
    linears: _Kept,
    embeddings: _Kept,
    experts: Mapping[str, _Kept],
    *,
    tied: bool,
) -> type[PreTrainedModel]:
    """A class that builds the model with the parameters of one shard, and layers for weights that stay quantised."""

    class ModelShard(model_class):
        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            _leave_out_images(self)
            if plan is not None and share is not None:
                cut(self, plan, share, self.config)
            for _, (path,) in linears:
                self.set_submodule(path, QuantizedLinear(self.get_submodule(path)))
            for _, (layer_path,) in embeddings:
                path = layer_path.removesuffix(".own")
                self.set_submodule(path, QuantizedEmbedding.of(self.get_submodule(path)))
            if tied:
                embedding = QuantizedEmbedding.of(self.get_input_embeddings(), self.get_output_embeddings())
                self.set_input_embeddings(embedding)
            _untie_quantized(self)
            for path, of_layer in experts.items():
                parts = 1 if of_layer[0][0].stacked else 2
                self.set_submodule(path, Experts.quantized(self.get_submodule(path), parts))

    ModelShard.__name__ = model_class.__name__
    ModelShard.__module__ = model_class.__module__
    return ModelShard


def _untie_quantized(model: PreTrainedModel) -> None:
    """Has `transformers` tie no weights of layers that have none, because theirs stay quantised."""
    modules = model.named_modules()
    quantized = {f"{path}.weight" for path, each in modules if isinstance(each, QuantizedLinear | QuantizedEmbedding)}
    if quantized:
        tied = model.all_tied_weights_keys.items()
        model.all_tied_weights_keys = {name: other for name, other in tied if not {name, other} & quantized}


def _leave_out_images(model: PreTrainedModel) -> None:
    """Removes the modules that read images from a model that has them, so that no weights are read for them."""
    decoder, base = model.get_decoder(), model.base_model
    if decoder is base or model.config.is_encoder_decoder:
        return
    for name, child in list(base.named_children()):
        if all(module is not decoder for module in child.modules()):
            setattr(base, name, None)


def _leave_out_text(model: PreTrainedModel) -> None:
    """Removes the text model and the head from a model that reads images, too."""
    decoder, base = model.get_decoder(), model.base_model
    for parent in {model, base}:
        for name, child in list(parent.named_children()):
            head = parent is model and parent is not base and child is not base
            if child is not base and (head or any(module is decoder for module in child.modules())):
                setattr(parent, name, None)


def cut(model: nn.Module, plan: ShardingPlan, share: Share, config: PretrainedConfig) -> None:
    """Gives every module parameters of the shard's shapes, before it has weights.

    model: a whole one, or a part of it. Raises UnsupportedModel for a matrix that the plan does not mention.
    """
    for path, module in model.named_modules():
        if plan.is_attention(path):
            _count_heads(module, plan.share(path, share))
        for name, parameter in list(module.named_parameters(recurse=False)):
            slice_ = plan.slice(f"{path}.{name}")
            if slice_ is not None:
                shape = slice_.shape(share, tuple(parameter.shape))
                setattr(module, name, nn.Parameter(parameter.new_empty(shape), parameter.requires_grad))
            elif parameter.dim() > 1 and not plan.is_whole(path):
                raise UnsupportedModel(
                    f"this {config.model_type} model cannot be split over several shards: "
                    f"its plan does not say how to split {path}.{name}"
                )
        if (split := plan.split(path)) is not None:
            _count_features(module)
            for name, layout in split.sizes.items():
                setattr(module, name, sum(map(len, layout(share, getattr(module, name)))))


def _count_heads(attention: nn.Module, share: Share) -> None:
    queries, keys = len(share.queries), len(share.keys)
    values: dict[str, Any] = dict.fromkeys(_QUERY_COUNTS, queries) | dict.fromkeys(_KEY_COUNTS, keys)
    values["num_key_value_groups"] = queries // keys
    head_dim: Any = getattr(attention, "head_dim", None)
    if head_dim is not None:
        values |= {"embed_dim": queries * head_dim, "split_size": queries * head_dim, "kv_dim": keys * head_dim}
    for name, value in values.items():
        if hasattr(attention, name):
            setattr(attention, name, value)
    if hasattr(attention, "config"):
        attention.config = LocalConfig(attention.config, share)  # type: ignore[assignment]
    attention.share = share  # type: ignore[assignment]


def _count_features(module: Any) -> None:
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
        module.padding_idx = None  # may be a token of another shard
    elif hasattr(module, "nf"):
        module.nf = module.weight.shape[1]
    elif hasattr(module, "intermediate_dim"):
        module.intermediate_dim = module.down_proj.shape[_expert_axis(module)]


def _expert_axis(module: Any) -> int:
    """Returns the axis of down_proj, [experts, ...], that has the intermediate features."""
    return 2 if module.down_proj.shape[1] == module.hidden_dim else 1


def surround(model: nn.Module, plan: ShardingPlan, share: Share, group: ShardGroup, config: PretrainedConfig) -> None:
    """Puts layers that bring results together around the modules of a model, or of a part, that need them."""
    vocab_size = config.get_text_config(decoder=True).vocab_size
    for path, module in list(model.named_modules()):
        split = plan.split(path)
        if split is None:
            continue
        for name, buffer in list(module.named_buffers(recurse=False)):  # they were computed, not read
            if (slice_ := split.tensors.get(name)) is not None:
                setattr(module, name, slice_.of(buffer, share))
        if split.layer is None:
            continue
        layer = split.layer(module, group, share)
        if isinstance(layer, VocabParallelHead):
            layer.vocab_size = vocab_size
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
