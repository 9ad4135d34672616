"""The files with a model's weights: their names, checks that they are whole, and the contents of their headers."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch
from huggingface_hub import parse_local_safetensors_file_metadata
from huggingface_hub.utils import TensorInfo
from safetensors import SafetensorError, safe_open

from tgi_server.engine.errors import InvalidWeights, ModelNotFound
from tgi_server.gguf.file import Gguf, read_gguf
from tgi_server.gguf.paths import SUFFIX, GgufError, first_part

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Name of one of several files of a model; the numbers show if a file is missing.
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The names of tensors that every expert of a layer has: layer, expert and the rest.
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that make up the model.

    Raises ModelNotFound when one is missing, and InvalidWeights when the index names one outside the folder, or when
    without an index the files of two models cannot be told apart.
    """
    index = folder / INDEX
    if index.is_file():
        names = index_names(index)
    else:
        names = {WEIGHTS} if (folder / WEIGHTS).is_file() else _numbered(folder) or {WEIGHTS}
    if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        raise ModelNotFound(
            f"{folder} has only .bin weights; convert them with `text-generation-server download-weights {folder}`"
        )
    return named_files(folder, names)


def weight_bytes(folder: Path) -> int:
    """Returns the bytes of the files that have the weights of a model's folder; 0 if it has none."""
    try:
        files = weight_files(folder)
    except (ModelNotFound, InvalidWeights):
        files = sorted(folder.glob(f"*{SUFFIX}"))
    return sum(file.stat().st_size for file in files)


def gguf_of(folder: Path) -> Gguf | None:
    """Returns the GGUF file that has the weights of a model's folder; None for other folders. Raises InvalidWeights."""
    files = sorted(file for file in folder.glob(f"*{SUFFIX}") if first_part(file.name))
    if not files or any(folder.glob("*.safetensors")):
        return None
    try:
        return _opened(files[0])
    except GgufError as error:
        raise InvalidWeights(str(error)) from error


@lru_cache(maxsize=2)
def _opened(path: Path) -> Gguf:
    return read_gguf(path, texts=False)


def index_names(index: Path) -> set[str]:
    """Returns the names of the files in an index of weights. Raises InvalidWeights for one outside of its folder."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidWeights(f"{index} is not an index of weights: {error}") from error
    if foreign := [name for name in names if not isinstance(name, str) or not _is_inside(name)]:
        raise InvalidWeights(f"{index} names {foreign[0]!r}, which is not a file of its folder; it is not loaded")
    return names


def named_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Returns the files of these names, in order. Raises ModelNotFound when one is missing."""
    files = [folder / name for name in sorted(names)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelNotFound(f"{folder} has no {missing[0]}; is the download complete?")
    return files


def write_index(folder: Path) -> None:
    """Writes the index of the safetensors files in a folder, if there are several."""
    headers = {file.name: tensor_infos(file) for file in sorted(folder.glob("*.safetensors"))}
    if len(headers) == 1:
        return
    size = sum(info.data_offsets[1] - info.data_offsets[0] for infos in headers.values() for info in infos.values())
    places = {name: file for file, infos in headers.items() for name in infos}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def tensor_infos(file: Path) -> dict[str, TensorInfo]:
    """Returns the dtype, shape and place of each tensor in a safetensors file, by its name."""
    return parse_local_safetensors_file_metadata(file).tensors


def _numbered(folder: Path) -> set[str]:
    """Returns the names of the files of a model that has several and no index; none if none is there."""
    found = [match for file in folder.glob("*.safetensors") if (match := _PART.fullmatch(file.name))]
    named = {(match[1], int(match[3])) for match in found}
    if len(named) > 1:
        some = ", ".join(sorted(match[0] for match in found)[:3])
        raise InvalidWeights(f"{folder} has no {INDEX}, and weights of several models: {some}; leave one of them there")
    return {f"{stem}-{part:05}-of-{count:05}.safetensors" for stem, count in named for part in range(1, count + 1)}


def _is_inside(name: str) -> bool:
    """Returns False for a path that leads out of the folder that it is relative to."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def check_files(folder: Path) -> None:
    """Raises InvalidWeights for a file that is damaged, with the first tensor that is not whole; ModelNotFound."""
    if gguf_of(folder) is not None:
        return
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            damage = _missing_part(path) or f"({str(error).splitlines()[0]})"
            raise InvalidWeights(f"{path} is corrupt or incomplete {damage}; download it again") from error


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Returns the float dtype of most of the model's numbers; None if there are no floats."""
    numbers: Counter[torch.dtype] = Counter()
    for path in weight_files(folder) if gguf_of(folder) is None else ():
        for info in tensor_infos(path).values():
            if (dtype := _FLOATS.get(info.dtype)) is not None:
                numbers[dtype] += info.parameter_count
    return max(numbers, key=numbers.__getitem__, default=None)


def check_experts(folder: Path) -> None:
    """Raises InvalidWeights for an expert that lacks a tensor that others have, or has it in another shape.

    `transformers` stacks experts as it loads them, and its error names no expert when they do not fit together.
    """
    found: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {}
    for path in weight_files(folder) if gguf_of(folder) is None else ():
        infos = tensor_infos(path)
        for match in filter(None, map(EXPERT.fullmatch, infos)):
            layer, expert, part = match.groups()
            found.setdefault((layer, part), {})[int(expert)] = tuple(infos[match[0]].shape)
    count = 1 + max((max(shapes) for shapes in found.values()), default=-1)
    for (layer, part), shapes in found.items():
        usual = Counter(shapes.values()).most_common(1)[0][0]
        for expert in range(count):
            name = f"{layer}.{expert}.{part}"
            if expert not in shapes:
                raise InvalidWeights(f"{folder}: tensor {name} is missing, which other experts have; download it again")
            if shapes[expert] != usual and ".quant_state." not in part:  # JSON of any length
                raise InvalidWeights(
                    f"{folder}: tensor {name} has the shape {list(shapes[expert])}, that of other experts {list(usual)}"
                )


def _missing_part(path: Path) -> str:
    """Says where a file ends too early; an empty text if it does not, or has no list of tensors."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(min(length, path.stat().st_size)))
        ends = {name: 8 + length + info["data_offsets"][1] for name, info in tensors.items() if name != "__metadata__"}
        name = min((name for name in ends if ends[name] > path.stat().st_size), key=ends.__getitem__)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    return f"from tensor {name} on: it has {path.stat().st_size:,} of {max(ends.values()):,} bytes"


def fingerprint(folder: Path) -> str:
    """Returns a text that is equal for files with equal names, tensors and shapes, whatever the values."""
    if (gguf := gguf_of(folder)) is not None:
        return gguf.fingerprint
    digest = hashlib.sha256()
    for path in weight_files(folder):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(length, path.stat().st_size)))
    return digest.hexdigest()[:16]
