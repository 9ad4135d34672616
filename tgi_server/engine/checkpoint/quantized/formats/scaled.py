"""Weights in FP8 or int8 with scales beside them: those of compressed-tensors, of DeepSeek and of fbgemm.

`weight`, [N, K], is multiplied by `weight_scale` or `weight_scale_inv`: one number, one for each output, or one for
each block of N and K. The last blocks may be cut off.
"""

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.source import Files, QuantizedSource
from tgi_server.engine.checkpoint.quantized.weight import QuantizedWeight
from tgi_server.engine.errors import InvalidWeights

_DTYPES = (torch.float8_e4m3fn, torch.int8)
_SUFFIXES = (".weight_scale", ".weight_scale_inv")

Block = tuple[int, int]


def sources(files: Files, block: Block | None = None) -> list[QuantizedSource]:
    """block: the outputs and inputs that share a scale, where scales are those of blocks."""
    found: list[QuantizedSource] = []
    for name in files:
        path, dot, kind = name.rpartition(".")
        if dot + kind in _SUFFIXES and f"{path}.weight" in files:
            found.append(_ScaledSource(f"{path}.weight", name, files, block))
    return found


class _ScaledSource(QuantizedSource):
    def __init__(self, name: str, scales: str, files: Files, block: Block | None) -> None:
        zeros = f"{name}_zero_point"
        super().__init__(name, (name, scales, *([zeros] if zeros in files else [])), files)
        self._scales = scales
        self._block = block

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size(self.name)

    def read(self) -> QuantizedWeight:
        codes = self.tensor(self.name, dtypes=_DTYPES)
        if codes.dtype != torch.int8 and bool(codes.float().isnan().any()):
            raise InvalidWeights(f"tensor {self.name} has numbers that are NaN; is the download complete?")
        scales, groups = self._by_group(self.tensor(self._scales).float(), *codes.shape)
        if len(self.parts) < 3:
            return QuantizedWeight.of(codes, scales, groups=groups)
        outputs = len(codes)
        zeros = self.tensor(self.parts[2], (), (1,), (outputs,), (outputs, 1), tuple(scales.shape)).float()
        zeros = zeros if zeros.dim() == 2 else zeros.reshape(-1, 1)
        return QuantizedWeight.of(codes, scales, zeros.expand(scales.shape), groups=groups)

    def _by_group(self, scales: Tensor, outputs: int, inputs: int) -> tuple[Tensor, Tensor | None]:
        """Returns scales as [outputs, groups], and the group of each input."""
        if scales.numel() in (1, outputs) and (scales.dim() < 2 or scales.shape[1] == 1):
            return scales.reshape(-1, 1).expand(outputs, 1), None
        rows, columns = self._block or (1, 0)
        columns = columns or max(1, inputs // max(1, scales.shape[-1]))
        wanted = -(-outputs // rows), -(-inputs // columns)
        if tuple(scales.shape) != wanted:
            blocks = f"in blocks of {rows} x {columns} " if self._block else ""
            raise InvalidWeights(
                f"tensor {self._scales} has the shape {list(scales.shape)}; for a weight of the shape "
                f"{[outputs, inputs]} {blocks}it would be {list(wanted)}"
            )
        return scales.repeat_interleave(rows, 0)[:outputs], torch.arange(inputs) // columns
