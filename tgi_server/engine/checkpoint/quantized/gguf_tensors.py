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
from tgi_server.engine.checkpoint.quantized.source import Files, QuantizedTensor
from tgi_server.engine.checkpoint.quantized.weight import QuantizedWeight, by_pieces
from tgi_server.engine.errors import InvalidWeights
from tgi_server.gguf.architectures import ROPE_TENSORS, Architecture, architecture_of, config_of, layer_of, part_of
from tgi_server.gguf.changes import Change, Order
from tgi_server.gguf.file import Bytes, Gguf, GgufTensor
from tgi_server.gguf.paths import GgufError

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Numbers of a weight that are unpacked at a time: with more, memory is taken from the system for each piece.
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class BlockTensor:
    """A tensor in blocks of llama.cpp; `[...]` dequantizes it to floats, as with the slices of safetensors.

    matrices: functions that return the bytes of a matrix, [outputs, bytes of a row]: one, or one for each expert of a
    layer, in which case the tensor is [experts, inputs, outputs]. mapped: the bytes of the file that they read. added:
    what the file has added to all numbers. of_numbers, columns: see Change. dense: it is always read in floats.
    """

    kind: str
    shape: tuple[int, ...]
    matrices: Sequence[Callable[[], Bytes]]
    mapped: Sequence[Bytes] = ()
    added: float = 0.0
    of_numbers: Callable[[Any], Any] | None = None
    columns: Order | None = None
    dense: bool = False

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.kind

    @property
    def is_packed(self) -> bool:
        """Returns True for a matrix whose codes the engine's kernels read."""
        return self.kind in TYPES and len(self.shape) > 1 and not self.dense

    def __getitem__(self, key: Any) -> Tensor:
        matrices = [_numbers(self.kind, matrix()) for matrix in self.matrices]
        whole = matrices[0] if len(matrices) == 1 else torch.stack([matrix.T for matrix in matrices])
        if self.of_numbers is not None:
            whole = torch.from_numpy(self.of_numbers(whole.float().numpy()))
        if self.columns is not None:
            whole = whole[..., torch.from_numpy(self.columns)]
        whole = whole.reshape(self.shape)
        return (whole - self.added if self.added else whole)[key]

    def weights(self) -> Iterator[QuantizedWeight]:
        """Yields the weight of each matrix."""
        size = self.shape[-1] if len(self.matrices) == 1 else self.shape[1]
        for matrix in self.matrices:
            parts = torch.from_numpy(matrix()).split(max(1, _AT_ONCE // size))
            weight = QuantizedWeight.joined(by_pieces(self._weight_of, parts))
            yield weight if self.columns is None else weight.reordered(torch.from_numpy(self.columns))

    def _weight_of(self, rows: Tensor) -> QuantizedWeight:
        return quantized_weight(self.kind, _blocks(self.kind, rows))

    def mapped_tensors(self) -> list[Tensor]:
        """Returns the bytes of the file, whose pages may be released."""
        return [torch.from_numpy(raw) for raw in self.mapped]


@dataclass(frozen=True, slots=True, eq=False)
class JoinedTensor:
    """The rows of several tensors in another order. order: for each row its index among the rows of all tensors."""

    parts: Sequence[BlockTensor]
    order: Order

    def get_shape(self) -> list[int]:
        return [len(self.order), *self.parts[0].shape[1:]]

    def get_dtype(self) -> str:
        return self.parts[0].kind

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.get_shape())

    @property
    def is_packed(self) -> bool:
        """Returns True if the engine's kernels read the codes of all parts."""
        return all(part.is_packed for part in self.parts)

    def __getitem__(self, key: Any) -> Tensor:
        whole: Tensor = torch.cat([part[...] for part in self.parts])[torch.from_numpy(self.order)]
        return whole[key]

    def weights(self) -> Iterator[QuantizedWeight]:
        """Yields the one weight."""
        joined = QuantizedWeight.joined([next(part.weights()) for part in self.parts])
        breaks = np.flatnonzero(np.diff(self.order) != 1) + 1
        yield joined.outputs([range(run[0], run[-1] + 1) for run in np.split(self.order, breaks)])

    def mapped_tensors(self) -> list[Tensor]:
        """Returns the bytes of the file, whose pages may be released."""
        return [tensor for part in self.parts for tensor in part.mapped_tensors()]


GgufWeight = BlockTensor | JoinedTensor


def gguf_tensors(file: Gguf) -> dict[str, GgufWeight]:
    """Returns the tensors by their names in `transformers`. Raises InvalidWeights for one that has none there."""
    try:
        architecture, config = architecture_of(file), config_of(file)
    except GgufError as error:
        raise InvalidWeights(str(error)) from error
    found: dict[str, GgufWeight] = {}
    for name, tensor in file.tensors.items():
        if name in ROPE_TENSORS or ((layer := layer_of(name)) is not None and layer >= config["num_hidden_layers"]):
            continue  # part of the configuration, or of a layer that only drafts
        part = part_of(name)
        if part in architecture.beside:
            continue  # read beside another tensor
        change = architecture.changes(config, part)
        own_name = architecture.name_in_model(name)
        if own_name is None:
            raise InvalidWeights(f"{file.path}: tensor {name} has no place in a model of {architecture.class_name}")
        if part in architecture.float_experts and not _is_packed(file, tensor):
            whole = f"{architecture.layers}.{layer}.{architecture.float_experts[part]}.weight"
            found |= {} if part == "ffn_up_exps" else {whole: _experts_in_floats(file, tensor)}
        elif "{}" in own_name:
            for expert in range(tensor.shape[0]):
                found[own_name.format(expert)] = _matrix(tensor.kind.name, tensor.shape[1:], tensor.raw[expert])
        elif architecture.stacked_experts and "_exps." in name:
            found[_parameter(own_name)] = _stacked(file, tensor)
        elif "_exps.weight" in name:
            found |= _experts_together(file, tensor, own_name)
        elif change.beside:
            found[own_name] = _joined(file, architecture, tensor, change)
        else:
            found[own_name] = _plain(file, architecture, tensor, change)
    return found


def gguf_numbers(tensor: GgufTensor) -> Tensor:
    """Returns the numbers of a tensor as it is in the file, in floats. Raises InvalidWeights."""
    return _numbers(tensor.kind.name, tensor.raw.reshape(-1, tensor.raw.shape[-1])).reshape(tensor.shape)


def gguf_types(file: Gguf) -> list[str]:
    """Returns the types of the file's matrices, the one with most numbers first."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1 and "_inp." not in tensor.name:  # routers are always in float32
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.raw.size
    return sorted(sizes, key=sizes.__getitem__, reverse=True)


def packed_sources(files: Files) -> list[QuantizedTensor]:
    """Returns a quantised tensor for every tensor whose codes the engine's kernels read."""
    return [
        QuantizedTensor(name, files, (name,), tensor.shape, tensor.weights, tensor.mapped_tensors)
        for name, tensor in files.items()
        if tensor.is_packed
    ]


def _joined(file: Gguf, architecture: Architecture, tensor: GgufTensor, change: Change) -> JoinedTensor:
    name = tensor.name.replace(part_of(tensor.name), change.beside or "")
    other = file.tensors.get(name)
    count = len(tensor.raw) + (0 if other is None else len(other.raw))
    order = np.arange(count) if change.rows is None else change.rows
    if other is None or len(order) != count:
        raise InvalidWeights(f"{file.path}: tensor {name} is missing beside {tensor.name}, or has another shape")
    return JoinedTensor([_plain(file, architecture, joined, Change()) for joined in (tensor, other)], order)


def _experts_together(file: Gguf, tensor: GgufTensor, place: str) -> dict[str, GgufWeight]:
    """Returns the weights of all experts, [experts, outputs, inputs], or each one's if kernels read those."""
    if not _is_packed(file, tensor):
        raw = tensor.raw
        whole = (lambda: raw.reshape(-1, raw.shape[-1]),)
        return {place: BlockTensor(tensor.kind.name, tensor.shape, whole, (raw,), dense=True)}
    stem, _, kind = place.rpartition(".")
    names = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
    experts, outputs, inputs = tensor.shape
    rows = outputs // len(names)
    return {
        f"{stem}.{expert}.{name}.weight": _matrix(
            tensor.kind.name, (rows, inputs), tensor.raw[expert, first * rows : (first + 1) * rows]
        )
        for expert in range(experts)
        for first, name in enumerate(names)
    }


def _is_packed(file: Gguf, tensor: GgufTensor) -> bool:
    """Returns True if kernels read the types of all experts' weights in a layer."""
    layer = tensor.name.rpartition(".ffn_")[0]
    of_layer = [other for name, other in file.tensors.items() if name.startswith(layer + ".") and "_exps.w" in name]
    return all(expert.kind.name in TYPES for expert in of_layer)


def _experts_in_floats(file: Gguf, tensor: GgufTensor) -> BlockTensor:
    """Returns the weights of all experts, [experts, outputs, inputs]; gate and up projections are concatenated."""
    parts = [tensor.raw]
    if "_gate_exps" in tensor.name:
        name = tensor.name.replace("_gate_exps", "_up_exps")
        other = file.tensors.get(name)
        if other is None or other.kind is not tensor.kind or other.shape != tensor.shape:
            raise InvalidWeights(f"{file.path}: tensors {tensor.name} and {name} do not have the same type and shape")
        parts.append(other.raw)
    experts, outputs, inputs = tensor.shape

    def matrix() -> Bytes:
        return np.concatenate(parts, 1).reshape(experts * len(parts) * outputs, -1)

    return BlockTensor(tensor.kind.name, (experts, len(parts) * outputs, inputs), (matrix,), parts, dense=True)


def _plain(file: Gguf, architecture: Architecture, tensor: GgufTensor, change: Change) -> BlockTensor:
    raw, shape = tensor.raw, tensor.shape
    part = part_of(tensor.name)
    if part == "ffn_gate_inp_shexp" and len(shape) == 1:  # a linear layer with one output
        shape = (1, *shape)
    added = architecture.norm_offset if part.endswith("norm") and part != "ssm_norm" else 0.0
    rows, size = change.rows, len(raw) if len(shape) > 1 else shape[0]
    if any(order is not None and len(order) != count for order, count in ((rows, size), (change.columns, shape[-1]))):
        raise InvalidWeights(f"{file.path}: tensor {tensor.name} has the shape {list(shape)}, which its metadata deny")
    flat = raw.reshape(size, -1)
    read = flat.view if rows is None else partial(np.take, flat, rows, 0)
    shape = change.shape(shape) if change.shape else shape
    own = change.of_numbers is not None or change.shape is not None
    return BlockTensor(tensor.kind.name, shape, (read,), (raw,), added, change.of_numbers, change.columns, dense=own)


def _matrix(kind: str, shape: tuple[int, ...], raw: Bytes) -> BlockTensor:
    return BlockTensor(kind, shape, (lambda: raw.reshape(-1, raw.shape[-1]),), (raw,))


def _parameter(place: str) -> str:
    """Returns the name of a parameter of all experts, which has no module; its bias is another parameter."""
    return place.removesuffix(".weight") if place.endswith(".weight") else place.replace(".bias", "_bias")


def _stacked(file: Gguf, tensor: GgufTensor) -> BlockTensor:
    """Returns the tensor of all experts, gate and up interleaved, or their bias, [experts, outputs]."""
    parts = [tensor.raw]
    if "_gate_exps" in tensor.name or "_up_exps" in tensor.name:
        names = [tensor.name.replace("_up_exps", "_gate_exps"), tensor.name.replace("_gate_exps", "_up_exps")]
        both = [file.tensors.get(name) for name in names]
        if any(half is None or half.kind is not tensor.kind or half.shape != tensor.shape for half in both):
            raise InvalidWeights(f"{file.path}: tensors {' and '.join(names)} do not have the same type and shape")
        parts = [half.raw for half in both if half is not None]
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
