"""Loads a model of `transformers` from a local folder."""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import logging as transformers_logging

from tgi_server.engine.checkpoint.cut import check_vocabulary, cut, surround
from tgi_server.engine.checkpoint.fill import empty_model, fill
from tgi_server.engine.checkpoint.model_folder import ModelFolder, first_line
from tgi_server.engine.checkpoint.quantized import Quantization, find_quantization
from tgi_server.engine.checkpoint.quantized.kv_scales import read_kv_scales
from tgi_server.engine.checkpoint.reader import Checkpoint, open_checkpoint
from tgi_server.engine.checkpoint.skeleton import QuantizedLayers, leave_out_images, leave_out_text
from tgi_server.engine.checkpoint.weight_files import check_experts, check_files, fingerprint, stored_dtype
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.errors import EngineError, InvalidWeights, UnsupportedModel
from tgi_server.engine.models.families import family_of, image_models, plan_for
from tgi_server.engine.parallel.group import ShardGroup
from tgi_server.engine.parallel.shares import share_of
from tgi_server.engine.progress import follow_transformers, progress
from tgi_server.loading import READING, ROUNDING

# Beginning of the names of a decoder's tensors in models of `transformers`.
_DECODER = "model."
# Of a checkpoint's dtype.
ChooseDtype = Callable[[torch.dtype | None], torch.dtype]


def load_model(
    config: EngineConfig,
    device: torch.device,
    choose_dtype: ChooseDtype | None = None,
    folder: ModelFolder | None = None,
) -> PreTrainedModel:
    """Returns the model, or this shard of it, in evaluation mode on `device`, after a check that no weight is missing.

    Only safetensors and GGUF files are read; `.bin` files are converted beforehand by `text-generation-server
    download-weights`. A GPU gets each tensor as it is read, so that the host holds few. choose_dtype: returns the dtype
    to compute in for that of the checkpoint, if it says one; None: the same. folder: the model's, if it has been read.

    Raises ModelNotFound, InvalidWeights or UnsupportedModel.
    """
    progress(READING)
    path, trust = config.model_path, config.trust_remote_code
    folder = folder or ModelFolder.read(path, trust_remote_code=trust)
    own = folder.model
    check_files(path)
    # Models that also read images say it beside what the text model is, and some older ones do not say it.
    said = next(filter(None, (getattr(each, "dtype", None) for each in (own.get_text_config(decoder=True), own))), None)
    checkpoint_dtype = said or stored_dtype(path)
    dtype = config.dtype or checkpoint_dtype or torch.float32
    if choose_dtype is not None:
        dtype = choose_dtype(checkpoint_dtype)
    if config.group is not None:
        check_shards(config, own, dtype)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with _explaining(path):
        quantization = find_quantization(path, own, config.quantize)
        if quantization is None:  # or else most of the time goes into weights that are not read by `transformers`
            follow_transformers(READING)
        model, report = load_tensors(
            path, own, model_factory(own), dtype, device, quantization, config.group, trust_remote_code=trust
        )
        if folder.generation:
            model.generation_config = GenerationConfig.from_dict({**folder.generation})
    model.quantization = quantization.text if quantization else ""
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing or mismatched:
        check_experts(path)
    if missing:
        raise InvalidWeights(f"{path}: weights are missing: {_some(missing)}")
    if mismatched:
        found = [f"{name} is {list(shape)}, not {list(wanted)}" for name, shape, wanted in mismatched]
        raise InvalidWeights(f"{path}: shapes differ from config.json: {_some(found)}")
    if config.kv_cache_dtype is not None:
        with open_checkpoint(path) as tensors:
            model.kv_scales = read_kv_scales(tensors)
    return model.to(device).eval().requires_grad_(False)


def check_shards(config: EngineConfig, model_config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Raises UnsupportedModel when the shards of a model are to load different things. model_config, dtype: its own."""
    assert config.group is not None
    facts = {
        "the version of torch": torch.__version__,
        "the version of transformers": transformers.__version__,
        "the model's config.json": json.dumps(model_config.to_diff_dict(), sort_keys=True, default=str),
        "the model's files of weights": fingerprint(config.model_path),
        "--dtype": str(dtype),
        "--quantize": str(config.quantize),
        "--kv-cache-dtype": str(config.kv_cache_dtype),
        "--disable-custom-kernels": str(not config.custom_kernels),
        "the kind of device": config.device.type,
    }
    config.group.check_same(facts)


def load_vision(
    path: Path, model_config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel | None:
    """Returns the parts of the model that read images, in evaluation mode on `device`; None for a model of text alone.

    path: the model's folder. model_config: the model's own. Raises UnsupportedModel for a model whose images are not
    served, and InvalidWeights where their weights are missing.
    """
    model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(model_config), None)
    if model_class is None:
        return None
    if not family_of(model_config).images:
        raise UnsupportedModel(
            f"images are not served with {model_config.model_type} models, only with {', '.join(image_models())}"
        )
    quantization = find_quantization(path, model_config, None)
    model_config = without_quantization(model_config)
    model_config.tie_word_embeddings = False  # of a head and embeddings that are not there
    with _explaining(path), open_checkpoint(path, quantization=quantization) as tensors:
        model, report = fill(model_class, model_config, leave_out_text, tensors, dtype, device)
    if missing := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise InvalidWeights(f"{path} lacks weights that read images: {_some(missing)}")
    return model.to(device).eval().requires_grad_(False)


def model_factory(config: PretrainedConfig) -> Any:
    """Returns the class of `transformers` that makes a model of a configuration: for text alone where there is one."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    images_too = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (
        AutoModelForImageTextToText
        if images_too and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        else AutoModelForCausalLM
    )


def load_tensors(
    folder: Path,
    config: PretrainedConfig,
    factory: Any,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None,
    group: ShardGroup | None = None,
    *,
    trust_remote_code: bool,
    names: Mapping[str, str] | None = None,
    arrange: Callable[[PreTrainedModel, Checkpoint], None] = lambda model, _: leave_out_images(model),
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Loads a model of the tensors in its files, quantised ones as such, and of nothing else in its folder.

    Returns it with what `transformers` reports of loading it. Of a group only this shard is ever in memory, and one
    quantised weight. config: the model's. factory: a class of `transformers` that has `from_config`. quantization: of
    its weights. names: beginnings of names in the files, and what stands for them in the model, which has no other
    tensors; None: all, by their names there. arrange: changes the model before it has weights, by the tensors that
    there are for it. Raises UnsupportedModel for a model that cannot be split over this many shards.
    """
    plan = None if group is None else plan_for(config)
    if plan is not None and names is not None:  # what stands beside the layers is not split
        beside = (own.removesuffix(".") for own in names.values() if not own.startswith(_DECODER))
        plan = replace(plan, whole=(*plan.whole, *beside))
    share = None if plan is None or group is None else share_of(group.rank, group.world_size, plan.heads)
    empty = empty_model(factory, without_quantization(config), trust_remote_code=trust_remote_code)
    with open_checkpoint(folder, plan, share, quantization) as whole:
        tensors = whole if names is None else _renamed(whole, names)
        with torch.device("meta"):
            arrange(empty, tensors)
        if plan is not None:
            check_vocabulary(empty, tensors, plan)
        quantized = QuantizedLayers.of(empty, tensors)

        def prepare(model: PreTrainedModel) -> None:
            arrange(model, tensors)
            if plan is not None and share is not None:
                cut(model, plan, share, model.config)
            quantized.place(model)

        # the configuration of the text model, where it is loaded without its images
        model, report = fill(type(empty), empty.config, prepare, quantized.others(tensors), dtype, device)
        quantized.fill(model, folder, device, ROUNDING if quantization and quantization.rounds else READING)
    model.name_or_path = model.config.name_or_path = str(folder)
    if plan is not None and share is not None and group is not None:
        surround(model, plan, share, group, config)
    return model, report


def load_layer(
    folder: Path,
    config: PretrainedConfig,
    names: Mapping[str, str],
    arrange: Callable[[PreTrainedModel, Checkpoint], None],
    what: str,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
    group: ShardGroup | None = None,
) -> PreTrainedModel:
    """Loads a drafter of one layer from a checkpoint that may have more, in evaluation mode.

    The arguments are those of `load_tensors`. what: the drafter, in words. Raises InvalidWeights or UnsupportedModel.
    """
    with _explaining(folder):
        model, report = load_tensors(
            folder, config, AutoModelForCausalLM, dtype, device, quantization, group,
            trust_remote_code=False, names=names, arrange=arrange,
        )  # fmt: skip
    if missing := [_renamed_back(name, names) for name in sorted(report["missing_keys"])]:
        raise InvalidWeights(f"{folder}: tensor {_some(missing)} is missing, which {what} needs")
    for name, shape, wanted in report["mismatched_keys"]:
        found = _renamed_back(name, names)
        raise InvalidWeights(f"shapes differ from config.json: {found} is {list(shape)}, not {list(wanted)}")
    return model.to(device).eval().requires_grad_(False)


def _renamed(tensors: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Returns the tensors whose names begin as the first of each pair, by names that begin as the second."""
    found: Checkpoint = {}
    for name, tensor in tensors.items():
        if prefix := next(filter(name.startswith, names), None):
            found[names[prefix] + name.removeprefix(prefix)] = tensor
    return found


def _renamed_back(name: str, names: Mapping[str, str]) -> str:
    """Returns the name of a tensor in the files."""
    prefix, own = next((prefix, own) for prefix, own in names.items() if name.startswith(own))
    return prefix + name.removeprefix(own)


def without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a copy that does not make `transformers` read quantised weights."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return plain


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Raises UnsupportedModel, or InvalidWeights for experts that do not fit together, for any error of loading."""
    try:
        yield
    except EngineError:
        raise
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, ImportError) as error:
        check_experts(path)
        raise UnsupportedModel(f"{path} cannot be loaded: {first_line(error)}") from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
