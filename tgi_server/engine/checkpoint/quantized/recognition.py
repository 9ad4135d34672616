"""Recognises how a checkpoint is quantised: by its config.json, by files of older tools, or by its tensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PretrainedConfig

from tgi_server.engine.checkpoint.quantized.formats import awq, bitsandbytes, gptq, mxfp4, packed, scaled
from tgi_server.engine.checkpoint.quantized.formats.gguf import TYPES
from tgi_server.engine.checkpoint.quantized.gguf_tensors import gguf_types, packed_sources
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS
from tgi_server.engine.checkpoint.quantized.rounding import sources as rounding_sources
from tgi_server.engine.checkpoint.quantized.source import Files, QuantizedTensor
from tgi_server.engine.checkpoint.weight_files import gguf_of
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.gguf.file import QUANTIZED

# Files that AutoGPTQ, AutoAWQ and ModelOpt wrote before config.json had these settings, with the method of each.
_OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# Ends of the names of tensors that only quantised checkpoints have.
_PARTS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".SCB")
# Layouts of AutoRound whose zeros are stored as they are.
_AUTO_ROUND_V2 = ("auto_round", "auto_round:gptqmodel")
# Values of ModelOpt's quant_algo: FP8 with one scale for a weight, or one for each output.
_MODELOPT_WEIGHTS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_INSTEAD = "take the same model as GPTQ, AWQ, compressed-tensors or FP8, or unquantised with --quantize int4"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The way in which the weights of a checkpoint are quantised.

    names: the values of --quantize that mean the same. text: description for people.
    sources: finds the quantised weights among the tensors of the checkpoint.
    rounds: the checkpoint has plain weights; those of linear layers before the head are rounded as they are read.
    """

    names: frozenset[str]
    text: str
    sources: Callable[[Files], Sequence[QuantizedTensor]]
    rounds: bool = False


def find_quantization(folder: Path, config: PretrainedConfig, requested: str | None) -> Quantization | None:
    """Returns the quantisation that a folder's weights have, or get as they are read; None: none.

    requested: the value of --quantize. Raises UnsupportedModel for a format that is not read, or when another one is
    requested.
    """
    found = _found(folder, config)
    if found is not None and requested is not None and requested not in found.names:
        raise UnsupportedModel(
            f"--quantize {requested} contradicts the checkpoint, whose weights are {found.text}; leave --quantize out"
        )
    if found is not None or requested is None:
        return found
    if requested not in ROUNDINGS:
        raise UnsupportedModel(
            f"--quantize {requested} is for checkpoints that are quantised so, and {folder} is not quantised; leave it "
            f"out, or use one that quantises while loading: {', '.join(ROUNDINGS)}"
        )
    text, rounding = ROUNDINGS[requested]
    return Quantization(frozenset(), text, partial(rounding_sources, rounding=rounding), rounds=True)


def _found(folder: Path, config: PretrainedConfig) -> Quantization | None:
    if (gguf := gguf_of(folder)) is not None:
        return _gguf(gguf_types(gguf))
    settings = _settings(folder, config)
    if settings is None:
        return None
    method = str(settings.get("quant_method") or "").lower().replace("_", "-")
    if method == "auto-round":
        method, settings = _of_auto_round(settings)
    if not method and "quant_algo" in settings:
        method = "modelopt"
    reader = _READERS.get(method)
    if reader is None:
        raise UnsupportedModel(
            f"{folder} is quantised as {method or 'something unnamed'}, which is not read; {_INSTEAD}"
        )
    try:
        return reader(settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModel(
            f"{folder} is quantised as {method}, but its settings cannot be used ({type(error).__name__}: {error}); "
            "download it again"
        ) from error


def _gguf(kinds: Sequence[str]) -> Quantization | None:
    """kinds: the types of the matrices in a file."""
    if not QUANTIZED & set(kinds):
        return None
    named = [kind if kind in TYPES or kind not in QUANTIZED else f"{kind} (dequantized)" for kind in kinds]
    return Quantization(frozenset(), f"GGUF, {', '.join(named)}", packed_sources)


def _settings(folder: Path, config: PretrainedConfig) -> Mapping[str, Any] | None:
    own = getattr(config, "quantization_config", None)
    if own is None:
        own = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if own is not None:
        return own if isinstance(own, Mapping) else own.to_dict()
    for name, method in _OLDER_FILES.items():
        if (folder / name).is_file():
            try:
                content = json.loads((folder / name).read_text())
                return {"quant_method": method, **(content["quantization"] if method == "modelopt" else content)}
            except KeyError as error:
                raise UnsupportedModel(f"{folder / name} has no object {error}; download it again") from error
            except (ValueError, TypeError) as error:
                raise UnsupportedModel(f"{folder / name} is not a JSON object: {error}") from error
    return _settings_of_tensors(folder)


def _settings_of_tensors(folder: Path) -> Mapping[str, Any] | None:
    """Returns settings that tensors show, such as those that TGI's `quantize` wrote beside the weights; or None."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if {"gptq_bits", "gptq_groupsize"} <= names:
                bits, size = (int(file.get_tensor(f"gptq_{name}").item()) for name in ("bits", "groupsize"))
                return {"quant_method": "gptq", "bits": bits, "group_size": size}
            if any(name.endswith(".q_weight") for name in names):
                return {"quant_method": "exl2"}
            if any(name.endswith(_PARTS) or ".quant_state." in name for name in names):
                raise UnsupportedModel(
                    f"{path} has quantised weights, but {folder} does not say how: there is no quantization_config in "
                    "config.json, and no quantize_config.json or quant_config.json; download the folder again"
                )
    return None


def _gptq(settings: Mapping[str, Any]) -> Quantization:
    read = gptq.GptqFormat.of(settings)
    order = ", act-order" if settings.get("desc_act") else ""
    return Quantization(frozenset({"gptq", "marlin"}), f"{read}{order}", partial(gptq.sources, settings=read))


def _awq(settings: Mapping[str, Any]) -> Quantization:
    read = awq.AwqFormat.of(settings)
    return Quantization(frozenset({"awq"}), str(read), partial(awq.sources, settings=read))


def _bitsandbytes(settings: Mapping[str, Any]) -> Quantization:
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        integers = partial(bitsandbytes.sources, kind=bitsandbytes.INT8)
        return Quantization(frozenset({"bitsandbytes"}), "bitsandbytes, 8 bits", integers)
    kind = str(settings.get("bnb_4bit_quant_type", "fp4"))
    double = ", double quantised" if settings.get("bnb_4bit_use_double_quant") else ""
    sources = partial(bitsandbytes.sources, kind=kind)
    return Quantization(frozenset({f"bitsandbytes-{kind}"}), f"bitsandbytes, {kind}{double}", sources)


def _compressed_tensors(settings: Mapping[str, Any]) -> Quantization:
    given = settings.get("config_groups")
    _checked(given, "config_groups", isinstance(given, Mapping) and bool(given), "an object with a group")
    groups = {name: _object(group, f"config_groups.{name}") for name, group in dict(given or {}).items()}
    layouts = {str(group.get("format") or settings.get("format")) for group in groups.values()}
    if unknown := sorted(layouts - {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}):
        raise UnsupportedModel(
            f"the compressed-tensors checkpoint has the format {unknown[0]}, which is not read; {_INSTEAD}"
        )
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnsupportedModel(f"the compressed-tensors checkpoint has sparse weights, which are not read; {_INSTEAD}")
    transforms = ((settings.get("transform_config") or {}).get("config_groups") or {}).values()
    if any(
        not str(applied["location"]).startswith("weight") for transform in transforms for applied in transform["apply"]
    ):
        raise UnsupportedModel(
            f"the compressed-tensors checkpoint rotates activations (transform_config), which is not done; {_INSTEAD}"
        )
    weights = _weights(groups)
    bits = frozenset(int(weight["num_bits"]) for weight in weights)
    if "pack-quantized" in layouts and (unknown_bits := sorted(bits - {2, 4, 8})):
        raise UnsupportedModel(
            f"the compressed-tensors checkpoint has weights packed in {unknown_bits[0]} bits; 2, 4 and 8 can be read"
        )
    sizes = frozenset(int(weight.get("group_size") or -1) for weight in weights)
    blocks = {_block(weight["block_structure"]) for weight in weights if weight.get("strategy") == "block"}
    kinds = sorted({f"{weight['num_bits']} bits" if weight["type"] == "int" else "FP8" for weight in weights})
    names = {"compressed-tensors"} | ({"fp8"} if kinds == ["FP8"] else set())
    block = next(iter(blocks), None)

    def sources(files: Files) -> Sequence[QuantizedTensor]:
        return [*packed.sources(files, bits, sizes), *scaled.sources(files, block)]

    return Quantization(frozenset(names), f"compressed-tensors, {' and '.join(kinds)}", sources)


def _checked(value: Any, name: str, fits: bool, needed: str) -> Any:
    """Returns the value of a setting in quantization_config. Raises UnsupportedModel if it is not what is needed."""
    if not fits:
        raise UnsupportedModel(f"config.json: quantization_config.{name} is {value!r:.80}; {needed} is needed")
    return value


def _object(value: Any, name: str) -> Any:
    return _checked(value, name, isinstance(value, Mapping), "an object")


def _weights(groups: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the settings for weights of each group."""
    found = [(f"config_groups.{name}.weights", group.get("weights")) for name, group in groups.items()]
    for name, weights in found:
        bits = _object(weights, name).get("num_bits")
        _checked(bits, f"{name}.num_bits", isinstance(bits, int), "a whole number")
        _checked(weights.get("type"), f"{name}.type", weights.get("type") in ("int", "float"), "int or float")
    return [weights for _, weights in found]


def _fp8(settings: Mapping[str, Any]) -> Quantization:
    size = settings.get("weight_block_size")
    if size is None:
        return Quantization(frozenset({"fp8"}), "FP8", scaled.sources)
    block = _block(size)
    text = f"FP8, blocks of {block[0]} x {block[1]}"
    return Quantization(frozenset({"fp8"}), text, partial(scaled.sources, block=block))


def _block(sizes: Sequence[Any]) -> scaled.Block:
    rows, columns = map(int, sizes)
    if min(rows, columns) < 1:
        raise ValueError(f"blocks of {rows} x {columns}")
    return rows, columns


def _mxfp4(settings: Mapping[str, Any]) -> Quantization:
    return Quantization(frozenset(), "MXFP4", mxfp4.sources)


def _modelopt(settings: Mapping[str, Any]) -> Quantization:
    """Scales of inputs are not needed, since inputs are not rounded; those of the KV cache are read elsewhere."""
    for setting, read in (("quant_algo", _MODELOPT_WEIGHTS), ("kv_cache_quant_algo", (None, "", "FP8"))):
        if settings.get(setting) not in read:
            raise UnsupportedModel(
                f"the ModelOpt checkpoint has the {setting} {settings.get(setting)!r:.80}, which is not read; FP8 is"
            )
    if int((settings.get("kv_cache_scheme") or {}).get("num_bits", 8)) != 8:
        raise UnsupportedModel(
            f"the ModelOpt checkpoint has the kv_cache_scheme {settings['kv_cache_scheme']!r:.80}, which is not read; "
            "FP8 is"
        )
    return Quantization(frozenset({"fp8"}), "ModelOpt, FP8", scaled.sources)


def _of_auto_round(settings: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the method in whose layout AutoRound has packed the weights, and the settings in the method's terms."""
    layout = str(settings.get("packing_format", ""))
    for setting, usual in (("data_type", "int"), ("act_bits", 16)):
        value = settings.get(setting)
        if value not in (None, usual, 32):
            raise UnsupportedModel(
                f"the AutoRound checkpoint has the {setting} {value!r:.40}, which is not read; {_INSTEAD}"
            )
    if layout in _AUTO_ROUND_V2:
        return "gptq", {**settings, "checkpoint_format": "gptq_v2"}
    method = next((method for method in ("gptq", "awq") if layout.endswith(f"auto_{method}")), f"auto-round, {layout}")
    return method, settings


_READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm-fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
