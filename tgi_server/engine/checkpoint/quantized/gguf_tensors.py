"""The tensors of a GGUF file, under the names and in the shapes that `transformers` has for them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.formats.gguf import TYPES, quantized_weight
from tgi_server.engine.checkpoint.quantized.source import Files, TensorSource
from tgi_server.engine.checkpoint.quantized.weight import QuantizedWeight
from tgi_server.engine.errors import InvalidWeights
from tgi_server.gguf.architectures import ROPE_TENSORS, Architecture, architecture_of
from tgi_server.gguf.file import Bytes, Gguf, GgufError, GgufTensor

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Numbers of a weight that are unpacked at a time.
_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class BlockTensor:
    """A tensor in blocks of llama.cpp; `[...]` reads it in floats, as with the slices of safetensors.

    matrices: functions that return the bytes of a matrix, [outputs, bytes of a row]: one, or one for each expert of a
    layer, in which case the tensor is [experts, inputs, outputs]. mapped: what they read of the file. added: what the
    file has added to all numbers.
    """

    kind: str
    shape: tuple[int, ...]
    matrices: Sequence[Callable[[], Bytes]]
    mapped: Sequence[Bytes] = ()
    added: float = 0.0

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.kind

    @property
    def is_packed(self) -> bool:
        """Returns True for a matrix whose codes the engine's kernels read."""
        return self.kind in TYPES and len(self.shape) > 1

    def __getitem__(self, key: Any) -> Tensor:
        matrices = [_numbers(self.kind, matrix()) for matrix in self.matrices]
        whole = matrices[0] if len(matrices) == 1 else torch.stack([matrix.T for matrix in matrices])
        whole = whole.reshape(self.shape)
        return (whole - self.added if self.added else whole)[key]

    def weights(self) -> Iterator[QuantizedWeight]:
        """Yields the weight of each matrix."""
        size = self.shape[-1] if len(self.matrices) == 1 else self.shape[1]
        for matrix in self.matrices:
            parts = torch.from_numpy(matrix()).split(max(1, _AT_ONCE // size))
            yield QuantizedWeight.joined([quantized_weight(self.kind, _blocks(self.kind, part)) for part in parts])

    def mapped_tensors(self) -> list[Tensor]:
        """Returns the bytes of the file, whose pages may be released."""
        return [torch.from_numpy(each) for each in self.mapped]


def gguf_tensors(file: Gguf) -> dict[str, BlockTensor]:
    """Returns the tensors by their names in `transformers`. Raises InvalidWeights for one that has none there."""
    try:
        architecture = architecture_of(file)
    except GgufError as error:
        raise InvalidWeights(str(error)) from error
    found: dict[str, BlockTensor] = {}
    for name, tensor in file.tensors.items():
        if name in ROPE_TENSORS:
            continue
        place = architecture.place(name)
        if place is None:
            raise InvalidWeights(f"{file.path}: tensor {name} has no place in a model of {architecture.class_name}")
        if "{}" in place:
            for expert in range(tensor.shape[0]):
                found[place.format(expert)] = _matrix(tensor.kind.name, tensor.shape[1:], tensor.raw[expert])
        elif architecture.stacked_experts and "_exps." in name:
            found[_parameter(place)] = _stacked(file, tensor)
        else:
            found[place] = _plain(file, architecture, tensor)
    return found


def gguf_types(file: Gguf) -> list[str]:
    """Returns the types of the file's matrices, the one with most numbers first."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1 and "_inp." not in tensor.name:  # routers are always in float32
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.raw.size
    return sorted(sizes, key=sizes.__getitem__, reverse=True)


def packed_sources(files: Files) -> list[TensorSource]:
    """Returns a source for every tensor whose codes the engine's kernels read."""
    return [
        TensorSource(name, files, (name,), tensor.shape, tensor.weights, tensor.mapped_tensors)
        for name, tensor in files.items()
        if tensor.is_packed
    ]


def _plain(file: Gguf, architecture: Architecture, tensor: GgufTensor) -> BlockTensor:
    raw, shape = tensor.raw, tensor.shape
    part = tensor.name.split(".")[-2]
    if architecture.interleaved and part in ("attn_q", "attn_k"):
        heads = file.metadata[f"{file.architecture}.attention.head_count{'_kv' if part == 'attn_k' else ''}"]
        raw = raw if len(shape) > 1 else raw.reshape(shape[0], -1)
        order = np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
        return BlockTensor(tensor.kind.name, shape, (partial(np.take, raw, order, 0),), (tensor.raw,))
    if part == "ffn_gate_inp_shexp" and len(shape) == 1:  # a linear layer with one output
        shape = (1, *shape)
    added = architecture.norm_offset if part.endswith("norm") else 0.0
    return _matrix(tensor.kind.name, shape, raw, added)


def _matrix(kind: str, shape: tuple[int, ...], raw: Bytes, added: float = 0.0) -> BlockTensor:
    return BlockTensor(kind, shape, (lambda: raw.reshape(-1, raw.shape[-1]),), (raw,), added)


def _parameter(place: str) -> str:
    """Returns the name of a parameter of all experts, which is no module, and whose bias is another."""
    return place.removesuffix(".weight") if place.endswith(".weight") else place.replace(".bias", "_bias")


def _stacked(file: Gguf, tensor: GgufTensor) -> BlockTensor:
    """Returns the tensor of all experts, gate and up interleaved, or their bias, [experts, outputs]."""
    parts = [tensor.raw]
    if "_gate_exps" in tensor.name or "_up_exps" in tensor.name:
        names = [tensor.name.replace("_up_exps", "_gate_exps"), tensor.name.replace("_gate_exps", "_up_exps")]
        both = [file.tensors.get(name) for name in names]
        if any(each is None or each.kind is not tensor.kind or each.shape != tensor.shape for each in both):
            raise InvalidWeights(f"{file.path}: tensors {' and '.join(names)} do not have the same type and shape")
        parts = [each.raw for each in both if each is not None]
    if tensor.name.endswith(".bias"):
        numbers = np.stack([part.view(np.float32) for part in parts], -1).reshape(len(tensor.raw), -1)
        return BlockTensor("F32", numbers.shape, (lambda: numbers.view(np.uint8),))
    experts, outputs, inputs = tensor.shape

    def matrix(expert: int) -> Bytes:
        return np.stack([part[expert] for part in parts], 1).reshape(len(parts) * outputs, -1)

    shape = (experts, inputs, len(parts) * outputs)
    return BlockTensor(tensor.kind.name, shape, [partial(matrix, expert) for expert in range(experts)], parts)


def _numbers(kind: str, raw: Bytes) -> Tensor:
    """Returns the numbers of rows: those of floats as they are, others in float32."""
    if kind in _FLOATS:
        return torch.from_numpy(raw).view(_FLOATS[kind])
    if kind in TYPES:
        return quantized_weight(kind, _blocks(kind, torch.from_numpy(raw))).dense()
    try:
        return torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]))
    except NotImplementedError:
        raise InvalidWeights(f"weights of the type {kind} are not read; take another file of the model") from None


def _blocks(kind: str, rows: Tensor) -> Tensor:
    """Returns rows, [outputs, bytes], in blocks: [outputs, blocks, bytes]."""
    return rows.unflatten(1, (-1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]))
