"""Weights in FP8 or int8 with scales beside them: those of compressed-tensors, of DeepSeek and of fbgemm.

`weight`, [N, K], is multiplied by `weight_scale` or `weight_scale_inv`: one number, one for each output, or one for
each block of N and K. The last blocks may be cut off.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.source import Files, QuantizedTensor, parts_of, read, size
from tgi_server.engine.checkpoint.quantized.weight import QuantizedWeight
from tgi_server.engine.errors import InvalidWeights

_DTYPES = (torch.float8_e4m3fn, torch.int8)
_SUFFIXES = (".weight_scale", ".weight_scale_inv")

Block = tuple[int, int]


def sources(files: Files, block: Block | None = None) -> list[QuantizedTensor]:
    """block: the outputs and inputs that share a scale, where scales are those of blocks."""
    found: list[QuantizedTensor] = []
    for name in files:
        path, dot, kind = name.rpartition(".")
        if dot + kind in _SUFFIXES and f"{path}.weight" in files:
            found.append(_source(f"{path}.weight", name, files, block))
    return found


def _source(name: str, scale_name: str, files: Files, block: Block | None) -> QuantizedTensor:
    zeros_name = f"{name}_zero_point"
    parts = parts_of(files, (name, scale_name), (zeros_name,))

    def weights() -> Iterator[QuantizedWeight]:
        codes = read(files, name, dtypes=_DTYPES)
        if codes.dtype != torch.int8 and bool(codes.float().isnan().any()):
            raise InvalidWeights(f"tensor {name} has numbers that are NaN; is the download complete?")
        scales, groups = _by_group(scale_name, read(files, scale_name).float(), block, *codes.shape)
        zeros = None
        if zeros_name in parts:
            outputs = len(codes)
            zeros = read(files, zeros_name, (), (1,), (outputs,), (outputs, 1), tuple(scales.shape)).float()
            zeros = (zeros if zeros.dim() == 2 else zeros.reshape(-1, 1)).expand(scales.shape)
        yield QuantizedWeight.of(codes, scales, zeros, groups=groups)

    return QuantizedTensor(name, files, parts, size(files, name), weights)


def _by_group(
    name: str, scales: Tensor, block: Block | None, outputs: int, inputs: int
) -> tuple[Tensor, Tensor | None]:
    """Returns scales as [outputs, groups], and the group of each input."""
    if scales.numel() in (1, outputs) and (scales.dim() < 2 or scales.shape[1] == 1):
        return scales.reshape(-1, 1).expand(outputs, 1), None
    rows, columns = block or (1, 0)
    columns = columns or max(1, inputs // max(1, scales.shape[-1]))
    expected = -(-outputs // rows), -(-inputs // columns)
    if tuple(scales.shape) != expected:
        blocks = f"in blocks of {rows} x {columns} " if block else ""
        raise InvalidWeights(
            f"tensor {name} has the shape {list(scales.shape)}; for a weight of the shape {[outputs, inputs]} {blocks}"
            f"it would be {list(expected)}"
        )
    return scales.repeat_interleave(rows, 0)[:outputs], torch.arange(inputs) // columns
