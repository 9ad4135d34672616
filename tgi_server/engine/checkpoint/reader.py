"""Reads tensors by their names from safetensors, GGUF and pickles: whole ones, or only a shard's slices; quantised
weights in their quantised form.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from tgi_server.engine.checkpoint.pickled import load_pickled
from tgi_server.engine.checkpoint.quantized import Quantization
from tgi_server.engine.checkpoint.quantized.gguf_tensors import gguf_tensors
from tgi_server.engine.checkpoint.quantized.rounding import STACKED
from tgi_server.engine.checkpoint.quantized.source import QuantizedTensor
from tgi_server.engine.checkpoint.weight_files import gguf_of, weight_files
from tgi_server.engine.errors import InvalidWeights, UnsupportedModel
from tgi_server.engine.memory import DeferredFree, mapped
from tgi_server.engine.parallel.plan import ShardingPlan, Slice
from tgi_server.engine.parallel.shares import Share

# What safetensors calls the dtypes of quantised weights.
_CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8")


@dataclass(frozen=True, slots=True, eq=False)
class SlicedTensor:
    """A tensor of a file, to read a shard's slice from; `[...]` reads it, as with the slices of safetensors.

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
        pieces = [self.source[(*before, slice(indices.start, min(indices.stop, size)))] for indices in ranges]
        length = sum(map(len, ranges))
        if len(pieces) == 1 and pieces[0].shape[axis] == length and pieces[0].is_contiguous():
            return pieces[0]
        shape = list(pieces[0].shape)
        shape[axis] = length
        return _joined(pieces, axis, shape)


def _joined(pieces: list[Tensor], axis: int, shape: list[int]) -> Tensor:
    """Joins pieces along an axis, with zeros for what is missing of the shape.

    The result is in pages of its own, which return to the system with the tensor. malloc could keep them, and weights
    are often copied to another layout and freed after loading.
    """
    whole = mapped(tuple(shape), pieces[0].dtype)
    start = 0
    for piece in pieces:
        whole.narrow(axis, start, piece.shape[axis]).copy_(piece)
        start += piece.shape[axis]
    return whole


Checkpoint = dict[str, SlicedTensor | QuantizedTensor]


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Returns all tensors of a safetensors file or, by any other ending, of a pickle.

    Raises InvalidWeights if it is corrupt, and FileNotFoundError if there is none.
    """
    if file.suffix != ".safetensors":
        return load_pickled(file)
    try:
        return load_file(file)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise InvalidWeights(f"{file} cannot be read: it is corrupt ({error}); download it again") from error


@contextmanager
def open_checkpoint(
    folder: Path,
    plan: ShardingPlan | None = None,
    share: Share | None = None,
    quantization: Quantization | None = None,
) -> Iterator[Checkpoint]:
    """Yields the tensors in a model's folder, by their names in the files; for a shard, only its slice of each.

    The parts of a quantised weight are yielded as one QuantizedTensor. Raises ModelNotFound or InvalidWeights, and
    SafetensorError for a file in another format.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        gguf = gguf_of(folder)
        if gguf is not None:
            files |= gguf_tensors(gguf)
        for path in weight_files(folder) if gguf is None else ():
            file = stack.enter_context(safe_open(path, framework="pt"))
            files |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        slices = plan.slice if plan else lambda _: None
        plain = {name: SlicedTensor(file, slices(name), share) for name, file in files.items()}
        quantized = quantization.sources(files) if quantization else []
        deferred = DeferredFree()
        stack.callback(deferred.free)
        for tensor in quantized:
            tensor.part, tensor.share, tensor.deferred = slices(tensor.name), share, deferred
            tensor.plain = plain[tensor.name] if quantization and quantization.rounds else None
            for name in tensor.names:
                del plain[name]
        if quantization and not quantization.rounds:
            _check_left_over({name: files[name] for name in plain})
        yield {**plain, **{tensor.name: tensor for tensor in quantized}}


def _check_left_over(plain: dict[str, Any]) -> None:
    """Raises an error for quantised codes that no reader has used: they must not be computed with as numbers.

    It is InvalidWeights for weights of layers, and UnsupportedModel for all experts' weights in one tensor.
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
