"""Checks the model's files before any process starts: their JSON and the headers of weights, without torch.

Faults that need more than that are found by the shards.
"""

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.control_groups import available_ram
from shared.gpus import has_gpu
from tgi_server.gguf.paths import SUFFIX, TENSORS, GgufError, first_part
from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.model_files.ready_models import ADAPTER_WEIGHTS
from tgi_server.router.adapter_source import AdapterSource
from tgi_server.shard.settings import QUANTIZE_OF_METHOD, ROUNDED_BYTES

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Files in which older tools say how they quantized a model.
_OLDER_SETTINGS = ("quantize_config.json", "quant_config.json")
_QUANTIZED = (".qweight", ".q_weight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".SCB")
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_LORA_A = ".lora_A.weight"
_GIB = 1 << 30

# A tensor as the header of a safetensors file has it: dtype, shape, data_offsets.
Header = Mapping[str, Mapping[str, Any]]


def check_model(settings: LauncherSettings, folder: Path) -> None:
    """Raises CannotStartError if a shard could not load the model, as far as its files show."""
    config = read_object(folder / "config.json")
    _check_type(folder, config, trust_remote_code=settings.trust_remote_code)
    tensors = _tensors(folder)
    _check_quantize(folder, config, tensors, settings.quantize)
    for adapter in settings.lora_adapters:
        check_adapter(adapter, config, tensors)
    if not has_gpu():
        _check_memory(settings, tensors)


def check_adapter(adapter: AdapterSource, config: Mapping[str, Any], base: Header) -> None:
    """Raises CannotStartError for an adapter that is not a LoRA of this base model.

    config, base: the model's configuration and its tensors.
    """
    place = Path(adapter.place)
    if place.suffix == SUFFIX:
        _check_gguf_adapter(adapter.id, place, config, base)
    else:
        _check_peft_adapter(adapter, place, base)


def _check_gguf_adapter(adapter_id: str, file: Path, config: Mapping[str, Any], base: Header) -> None:
    from tgi_server.gguf.adapters import read_gguf_adapter

    text_config = config.get("text_config")
    own = text_config if isinstance(text_config, dict) else config
    try:
        found = read_gguf_adapter(file, str(own.get("model_type", config.get("model_type"))))
    except GgufError as error:
        raise CannotStartError(f"--lora-adapters: {adapter_id}: {error}") from None
    for name, (a, _) in found.matrices.items():
        weight = base.get(found.architecture.name_in_model(name) or "")
        if weight and not _takes(weight, a.shape):
            raise CannotStartError(
                f"--lora-adapters: {adapter_id}: {name}.lora_a is {list(a.shape)}, but that weight of the model is "
                f"{weight['shape']}; the adapter was made for another model"
            )


def _check_peft_adapter(adapter: AdapterSource, folder: Path, base: Header) -> None:
    config = read_object(folder / ADAPTER_CONFIG)
    where = f"--lora-adapters: {adapter.id}: {folder / ADAPTER_CONFIG}"
    if (kind := config.get("peft_type")) != "LORA":
        raise CannotStartError(f"{where}: peft_type is {kind!r}; only LORA adapters are served")
    if modules := config.get("modules_to_save"):
        raise CannotStartError(
            f"{where}: modules_to_save is {modules}, and whole modules are not served beside the base model's; merge "
            "the adapter with peft, and serve the merged model"
        )
    weights = folder / ADAPTER_WEIGHTS
    for name, tensor in (_header(weights) if weights.is_file() else {}).items():
        layer = f"{name.removeprefix('base_model.model.').removesuffix(_LORA_A)}.weight"
        weight = base.get(layer) or base.get(layer.removeprefix("model."))
        if name.endswith(_LORA_A) and weight and not _takes(weight, tensor["shape"]):
            raise CannotStartError(
                f"--lora-adapters: {adapter.id}: {name} is {tensor['shape']}, but {layer} of the model is "
                f"{weight['shape']}; the adapter was made for "
                f"{config.get('base_model_name_or_path') or 'another model'}"
            )


def _takes(weight: Mapping[str, Any], lora_a: Sequence[int]) -> bool:
    """Returns False if the weight has not the inputs of an adapter's matrix, which is [rank, inputs].

    A model's weight is [outputs, inputs], or [inputs, outputs] in models like GPT-2; quantized weights are not checked.
    """
    is_plain = weight["dtype"] in _FLOAT_BYTES and len(weight["shape"]) == len(lora_a) == 2
    return not is_plain or lora_a[1] in weight["shape"]


def _check_type(folder: Path, config: Mapping[str, Any], *, trust_remote_code: bool) -> None:
    kind = config.get("model_type")
    if kind is None or _is_known(str(kind)) or (config.get("auto_map") and trust_remote_code):
        return
    what = f"{folder / 'config.json'}: the installed transformers has no model of the type {kind!r}"
    if config.get("auto_map"):
        raise CannotStartError(f"{what}; it comes with its own code, which runs only with --trust-remote-code")
    raise CannotStartError(f"{what}; a newer release may have it: pip install -U transformers")


def _is_known(model_type: str) -> bool:
    """Returns False if transformers' tables of models lack the type. They are read as text: imports take seconds."""
    spec = importlib.util.find_spec("transformers")
    tables = [*Path(spec.origin).parent.glob("models/auto/*.py")] if spec and spec.origin else []
    return not tables or any(f'"{model_type}"' in table.read_text(encoding="utf-8") for table in tables)


def _check_quantize(folder: Path, config: Mapping[str, Any], tensors: Header, requested: str | None) -> None:
    if requested is None:
        return
    if any(folder.glob(f"*{SUFFIX}")):
        from tgi_server.gguf.file import QUANTIZED

        if kinds := {tensor["dtype"] for tensor in tensors.values()} & QUANTIZED:
            raise CannotStartError(
                f"--quantize {requested} contradicts the GGUF file, which is quantized ({', '.join(sorted(kinds))}); "
                "leave --quantize out"
            )
    text_config = config.get("text_config")
    found = config.get("quantization_config") or (
        text_config.get("quantization_config") if isinstance(text_config, dict) else None
    )
    if isinstance(found, dict):
        method = str(found.get("quant_method", "")).lower().replace("_", "-")
        if requested not in QUANTIZE_OF_METHOD.get(method, (requested,)):
            raise CannotStartError(
                f"--quantize {requested} contradicts the checkpoint, which is quantized as {method}; leave --quantize "
                "out"
            )
    elif (
        requested not in ROUNDED_BYTES
        and not any((folder / name).is_file() for name in _OLDER_SETTINGS)
        and not any(name.endswith(_QUANTIZED) or ".quant_state." in name for name in tensors)
    ):
        raise CannotStartError(
            f"--quantize {requested} is for checkpoints that are quantized in this way, and {folder} is not "
            f"quantized; leave it out, or use one that quantizes while loading: {', '.join(ROUNDED_BYTES)}"
        )


def weight_bytes(settings: LauncherSettings, folder: Path) -> int:
    """Returns about the bytes that the model's weights take once they are loaded. Raises CannotStartError."""
    return int(sum(_bytes(tensor, settings) for tensor in _tensors(folder).values()))


def _check_memory(settings: LauncherSettings, tensors: Header) -> None:
    """Raises CannotStartError if the weights, or weights and KV cache, cannot fit into this machine's memory."""
    weights = sum(_bytes(tensor, settings) for tensor in tensors.values())
    if settings.num_nodes > 1:
        weights /= settings.num_nodes
    free = available_ram()
    if weights > free:
        raise CannotStartError(
            f"the model's weights take {weights / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB of memory are available; "
            "use a smaller model, or quantize it (--quantize int4)"
        )
    if settings.cpu_memory is not None and weights + settings.cpu_memory > free:
        raise CannotStartError(
            f"--cpu-memory is {settings.cpu_memory / _GIB:.1f} GiB and the model's weights take "
            f"{weights / _GIB:.1f} GiB, but {free / _GIB:.1f} GiB of memory are available; lower --cpu-memory"
        )


def _bytes(tensor: Mapping[str, Any], settings: LauncherSettings) -> float:
    """Returns a lower bound of the bytes that a tensor takes once it is loaded."""
    if tensor["dtype"] not in _FLOAT_BYTES:  # quantized already
        first, last = tensor["data_offsets"]
        return float(last - first)
    width: float = _FLOAT_BYTES[tensor["dtype"]]
    if settings.quantize in ROUNDED_BYTES and len(tensor["shape"]) > 1:
        width = ROUNDED_BYTES[settings.quantize or ""]
    elif settings.dtype is not None:
        width = _DTYPE_BYTES[settings.dtype]
    return width * math.prod(tensor["shape"])


def _tensors(folder: Path) -> Header:
    """Returns all tensors of the model. Raises CannotStartError for files that are missing or not whole."""
    if (described := folder / TENSORS).is_file():
        return read_object(described)
    index = folder / _INDEX
    if gguf := sorted(file for file in folder.glob(f"*{SUFFIX}") if first_part(file.name)):
        return _gguf_tensors(gguf[0])
    names = {file.name for file in folder.glob("*.safetensors") if file.name != ADAPTER_WEIGHTS}
    if not index.is_file() and _WEIGHTS in names:  # others beside it are the same weights in another format
        names = {_WEIGHTS}
    elif index.is_file():
        parts = read_object(index).get("weight_map")
        names = set(parts.values()) if isinstance(parts, dict) else names
    tensors: dict[str, Mapping[str, Any]] = {}
    for name in sorted(map(str, names)):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CannotStartError(f"{index} names {name!r}, which is not a file of its folder; it is not loaded")
        if not (folder / name).is_file():
            raise CannotStartError(f"{folder} lacks {name}, which {_INDEX} names; download it again")
        tensors.update(_header(folder / name))
    return tensors


def _gguf_tensors(file: Path) -> Header:
    """Returns the tensors of a GGUF file in this form, by their names in `transformers`. Raises CannotStartError."""
    from tgi_server.gguf.architectures import tensor_headers  # imports numpy, which other models do not need here
    from tgi_server.gguf.file import read_gguf

    try:
        return tensor_headers(read_gguf(file, texts=False))
    except GgufError as error:
        raise CannotStartError(str(error)) from None


def _header(file: Path) -> Header:
    """Returns the tensors of a safetensors file. Raises CannotStartError when it is not whole.

    The file has eight bytes of length, a header in JSON, and the data: https://huggingface.co/docs/safetensors.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, size)))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        ends = {name: 8 + length + tensor["data_offsets"][1] for name, tensor in tensors.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise CannotStartError(f"{file} is corrupt or incomplete (no header can be read); download it again") from None
    if cut := [name for name in ends if ends[name] > size]:
        first = min(cut, key=ends.__getitem__)
        raise CannotStartError(
            f"{file} is corrupt or incomplete from tensor {first} on: it has {size:,} of {max(ends.values()):,} bytes; "
            "download it again"
        )
    return tensors


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object of a file. Raises CannotStartError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CannotStartError(f"{file.parent} has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise CannotStartError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CannotStartError(f"{file} is not a JSON object; download it again")
    return content
