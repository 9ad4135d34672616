"""Reads a model's safetensors files, or a shard's slices of them and nothing else; quantised weights as such."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tgi_server.engine.checkpoint.quantized import Quantization, QuantizedWeight
from tgi_server.engine.checkpoint.quantized.rounding import STACKED
from tgi_server.engine.checkpoint.quantized.source import TensorSource
from tgi_server.engine.errors import InvalidWeights, ModelNotFound, UnsupportedModel
from tgi_server.engine.memory import DeferredFree, mapped
from tgi_server.engine.parallel.plan import ShardingPlan, Slice
from tgi_server.engine.parallel.shares import Share

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# One of the files of a model that has several; their numbers say if they are all there.
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
# What safetensors calls the dtypes of quantised weights.
_CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The names of tensors of which every expert of a layer has one: layer, expert and the rest.
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, eq=False)
class SlicedTensor:
    """A tensor of a file of which a shard needs a slice; `[...]` reads it, as with the slices of safetensors.

    source: what `get_slice` of an open safetensors file returns. part: the slice; None: all of the tensor.
    """

    source: Any
    part: Slice | None = None
    share: Share | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return tuple(self.source.get_shape())

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape(self.share, self.whole_shape) if self.part and self.share else self.whole_shape

    def __getitem__(self, _: EllipsisType) -> Tensor:
        if self.part is None or self.share is None:
            return self.source[...]
        axis = self.part.axis
        if axis is None:
            whole = self.source[...]
            return whole if self.share.rank == 0 else torch.zeros_like(whole)
        size = self.whole_shape[axis]
        ranges = self.part.ranges(self.share, size)
        before = (slice(None),) * axis
        pieces = [self.source[(*before, slice(each.start, min(each.stop, size)))] for each in ranges]
        length = sum(map(len, ranges))
        if len(pieces) == 1 and pieces[0].shape[axis] == length and pieces[0].is_contiguous():
            return pieces[0]
        shape = list(pieces[0].shape)
        shape[axis] = length
        return _joined(pieces, axis, shape)


def _joined(pieces: list[Tensor], axis: int, shape: list[int]) -> Tensor:
    """Joins pieces along an axis, with zeros for what is missing of the shape.

    The result is in pages of its own, which go back to the system with the tensor: malloc may keep what it gets back,
    and weights are often arranged anew once they are loaded.
    """
    whole = mapped(tuple(shape), pieces[0].dtype)
    start = 0
    for piece in pieces:
        whole.narrow(axis, start, piece.shape[axis]).copy_(piece)
        start += piece.shape[axis]
    return whole


@dataclass(slots=True, eq=False)
class QuantizedTensor:
    """A tensor of a quantised checkpoint of which a shard needs a slice, `part`.

    `[...]` reads it as a dense tensor, `weights` as it is stored. plain: the tensor in a checkpoint that is not
    quantised itself, which `[...]` then reads. transposed: the model has it as [inputs, outputs].
    """

    source: TensorSource
    deferred: DeferredFree
    part: Slice | None
    share: Share | None
    plain: SlicedTensor | None
    transposed: bool = False

    @property
    def name(self) -> str:
        """The name of the dense tensor that it stands for."""
        return self.source.name

    @property
    def stacked(self) -> bool:
        """True for the weights of a layer's experts in one tensor, False for the weight of a linear layer."""
        return self.source.stacked

    @property
    def shape(self) -> tuple[int, ...]:
        if self.plain is not None:
            return self.plain.shape
        shape = self.source.shape[::-1] if self.transposed else self.source.shape
        return self.part.shape(self.share, shape) if self.part and self.share else shape

    def weights(self) -> Iterator[QuantizedWeight]:
        """Yields this shard's part of the weight, [outputs, inputs], or of each expert's. Raises InvalidWeights."""
        for weight in self.source.weights():
            if not bool(weight.scales.isfinite().all()):
                raise InvalidWeights(
                    f"the scales of tensor {self.source.name} are not all finite numbers; download the folder again"
                )
            yield self._part(weight)
        self.deferred.add(self.source.stored())

    def _part(self, weight: QuantizedWeight) -> QuantizedWeight:
        if self.part is None or self.part.axis is None:
            return weight
        outputs = self.part.axis == (2 if self.stacked else 1 if self.transposed else 0)
        ranges = self._ranges(weight.shape[0 if outputs else 1])
        return weight.outputs(ranges) if outputs else weight.inputs(ranges)

    def __getitem__(self, _: EllipsisType) -> Tensor:
        if self.plain is not None:
            return self.plain[...]
        if not self.stacked:
            (weight,) = self.weights()
            dense = weight.dense()
            return dense.T.contiguous() if self.transposed else dense
        dense = self.source.dense()
        if self.part is None or self.part.axis is None:
            return dense
        axis = self.part.axis
        pieces = [dense.narrow(axis, each.start, len(each)) for each in self._ranges(dense.shape[axis])]
        return torch.cat(pieces, axis)

    def _ranges(self, size: int) -> list[range]:
        assert self.part is not None
        assert self.share is not None
        return self.part.ranges(self.share, size)


Checkpoint = dict[str, SlicedTensor | QuantizedTensor]


@contextmanager
def open_checkpoint(
    folder: Path,
    plan: ShardingPlan | None = None,
    share: Share | None = None,
    quantization: Quantization | None = None,
) -> Iterator[Checkpoint]:
    """Yields the tensors in a model's folder, by their names in the files; of a shard what it needs of each.

    The parts of quantised weights are yielded as the tensors that they stand for. Raises ModelNotFound or
    InvalidWeights, and SafetensorError for a file in another format.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in weight_files(folder):
            file = stack.enter_context(safe_open(path, framework="pt"))
            files |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        sources = quantization.sources(files) if quantization else []
        slices = plan.slice if plan else lambda _: None
        tensors: Checkpoint = {}
        plain = {name: SlicedTensor(file, slices(name), share) for name, file in files.items()}
        deferred = DeferredFree()
        stack.callback(deferred.free)
        for source in sources:
            rounded = plain[source.name] if quantization and quantization.rounds else None
            tensors[source.name] = QuantizedTensor(source, deferred, slices(source.name), share, rounded)
            for part in source.parts:
                del plain[part]
        if quantization and not quantization.rounds:
            _check_left_over({name: files[name] for name in plain})
        yield {**plain, **tensors}


def _check_left_over(plain: dict[str, Any]) -> None:
    """Raises an error for codes that no reader has taken: they are no numbers to compute with.

    It is InvalidWeights for weights of layers, and UnsupportedModel for those of experts that stand in one tensor.
    """
    for name, file in plain.items():
        if not name.endswith((".weight", *STACKED)) or (dtype := file.get_dtype()) not in _CODES:
            continue
        if name.endswith(STACKED):
            raise UnsupportedModel(
                f"tensor {name} has all experts of a layer in {dtype}, which is not read; take the same model with "
                "tensors for each expert, or unquantised with --quantize int4"
            )
        raise InvalidWeights(
            f"tensor {name} is quantised ({dtype}), but the tensors beside it that say what it stands for are missing; "
            "is the download complete?"
        )


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that make up the model.

    Raises ModelNotFound when one is missing, and InvalidWeights when the index names one outside the folder, or when
    there is none to tell the files of two models apart.
    """
    index = folder / INDEX
    if not index.is_file():
        names = {WEIGHTS} if (folder / WEIGHTS).is_file() else _numbered(folder) or {WEIGHTS}
    else:
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InvalidWeights(f"{index} is not an index of weights: {error}") from error
        if foreign := [name for name in names if not isinstance(name, str) or not _is_inside(name)]:
            raise InvalidWeights(f"{index} names {foreign[0]!r}, which is not a file of its folder; it is not loaded")
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
            raise ModelNotFound(
                f"{folder} has only .bin weights; convert them with `text-generation-server download-weights {folder}`"
            )
        raise ModelNotFound(f"{folder} has no {missing[0]}; is the download complete?")
    return [folder / name for name in sorted(names)]


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
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            damage = _missing_part(path) or f"({str(error).splitlines()[0]})"
            raise InvalidWeights(f"{path} is corrupt or incomplete {damage}; download it again") from error


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Returns the dtype of floats that most numbers of the model are stored in; None if there are no floats."""
    numbers: Counter[torch.dtype] = Counter()
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                if (dtype := _FLOATS.get(tensor.get_dtype())) is not None:
                    numbers[dtype] += math.prod(tensor.get_shape())
    return max(numbers, key=numbers.__getitem__, default=None)


def check_experts(folder: Path) -> None:
    """Raises InvalidWeights for an expert that lacks a tensor that others have, or has it in another shape.

    `transformers` stacks experts as it loads them, and names none of them when they do not fit together.
    """
    found: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for match in filter(None, map(EXPERT.fullmatch, file.keys())):
                layer, expert, part = match.groups()
                found.setdefault((layer, part), {})[int(expert)] = tuple(file.get_slice(match[0]).get_shape())
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
        ends = {name: 8 + length + each["data_offsets"][1] for name, each in tensors.items() if name != "__metadata__"}
        name = min((name for name in ends if ends[name] > path.stat().st_size), key=ends.__getitem__)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    return f"from tensor {name} on: it has {path.stat().st_size:,} of {max(ends.values()):,} bytes"


def fingerprint(folder: Path) -> str:
    """Returns the same text for the same tensors in the same files, whatever their values."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(length, path.stat().st_size)))
    return digest.hexdigest()[:16]
