"""compressed-tensors, "pack-quantized": integers of a few bits in words, and a scale for each group.

For a layer with K inputs and N outputs, in b bits: `weight_packed`, [N, K * b / 32] int32, low bits first, stored with
2^(b - 1) added; `weight_scale`, [N, groups]; `weight_zero_point`, [N * b / 32, groups], packed likewise along N, or in
int8; `weight_g_idx`, [K], the group of each input; `weight_shape`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.source import (
    Files,
    QuantizedTensor,
    codes_of,
    parts_of,
    read,
    read_groups,
    size,
    unpacked,
    whole_numbers,
    words_of,
)
from tgi_server.engine.checkpoint.quantized.weight import QuantizedWeight
from tgi_server.engine.errors import InvalidWeights

_PACKED = ".weight_packed"


def sources(files: Files, bits: frozenset[int], sizes: frozenset[int]) -> list[QuantizedTensor]:
    """bits, sizes: of codes and of groups (-1: one group) that the settings of the checkpoint name; a layer has one of
    them each.
    """
    return [_source(name.removesuffix(_PACKED), files, bits, sizes) for name in files if name.endswith(_PACKED)]


def _source(path: str, files: Files, known_bits: frozenset[int], sizes: frozenset[int]) -> QuantizedTensor:
    packed, scale, stored_shape, zero_point, g_idx = (
        f"{path}.weight_{kind}" for kind in ("packed", "scale", "shape", "zero_point", "g_idx")
    )
    parts = parts_of(files, (packed, scale, stored_shape), (zero_point, g_idx))
    outputs, inputs = read(files, stored_shape, (2,)).tolist()
    bits = _bits(files, packed, outputs, inputs, known_bits)

    def weights() -> Iterator[QuantizedWeight]:
        codes = codes_of(read(files, packed, dtypes=(torch.int32,)), bits, inputs)
        stored = read(files, scale).float()
        scales = stored.reshape(1, 1).expand(outputs, 1) if stored.numel() == 1 else stored
        expected = [(outputs, max(1, inputs // size) if size > 0 else 1) for size in sorted(sizes)]
        if tuple(scales.shape) not in expected or inputs % scales.shape[1]:
            known = " or ".join("one group" if size < 0 else f"groups of {size}" for size in sorted(sizes))
            raise InvalidWeights(
                f"tensor {scale} has the shape {list(stored.shape)}, which does not divide a weight of the shape "
                f"{[outputs, inputs]} into {known}"
            )
        zeros = _zeros(files, zero_point, outputs, scales.shape[1], bits) if zero_point in parts else None
        groups = read_groups(files, g_idx, inputs, scales.shape[1]) if g_idx in parts else None
        yield whole_numbers(codes, zeros, scales, bits, groups)

    return QuantizedTensor(f"{path}.weight", files, parts, (outputs, inputs), weights)


def _bits(files: Files, name: str, outputs: int, inputs: int, known: frozenset[int]) -> int:
    fitting = [bits for bits in sorted(known) if size(files, name) == (outputs, words_of(inputs, bits))]
    if not fitting:
        raise InvalidWeights(
            f"tensor {name} has the shape {list(size(files, name))}, which holds no weight of the shape "
            f"{[outputs, inputs]} in {' or '.join(map(str, sorted(known)))} bits"
        )
    return fitting[0]


def _zeros(files: Files, name: str, outputs: int, count: int, bits: int) -> Tensor:
    stored = read(files, name, (outputs, count), (words_of(outputs, bits), count))
    if stored.dtype == torch.int32:
        return unpacked(stored, bits, outputs).float()
    return stored.float() + 2 ** (bits - 1)
