"""compressed-tensors, "pack-quantized": integers of a few bits in words, and a scale for each group.

Of a layer with K inputs and N outputs, in b bits: `weight_packed`, [N, K * b / 32] int32, low bits first, and higher by
2^(b - 1) than they are; `weight_scale`, [N, groups]; `weight_zero_point`, [N * b / 32, groups], packed likewise along
N, or in int8; `weight_g_idx`, [K], the group of each input; `weight_shape`.
"""

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.source import (
    Files,
    QuantizedSource,
    codes_of,
    unpacked,
    whole_numbers,
    words_of,
)
from tgi_server.engine.checkpoint.quantized.weight import QuantizedWeight
from tgi_server.engine.errors import InvalidWeights

_PACKED = ".weight_packed"


def sources(files: Files, bits: frozenset[int], sizes: frozenset[int]) -> list[QuantizedSource]:
    """bits, sizes: of codes and of groups (-1: one group) that the settings of the checkpoint name; a layer has one of
    them each.
    """
    return [_PackedSource(name.removesuffix(_PACKED), files, bits, sizes) for name in files if name.endswith(_PACKED)]


class _PackedSource(QuantizedSource):
    def __init__(self, path: str, files: Files, bits: frozenset[int], sizes: frozenset[int]) -> None:
        self._path = path
        self._sizes = sizes
        kinds = ("packed", "scale", "shape", "zero_point", "g_idx")
        names = [f"{path}.weight_{kind}" for kind in kinds]
        for name in names[:3]:
            if name not in files:
                raise InvalidWeights(f"tensor {name} is missing beside {names[0]}")
        super().__init__(f"{path}.weight", tuple(name for name in names if name in files), files)
        self._outputs, self._inputs = self.tensor(names[2], (2,)).tolist()
        self._bits = self._bits_of(bits)

    def _bits_of(self, known: frozenset[int]) -> int:
        name = f"{self._path}{_PACKED}"
        fitting = [bits for bits in sorted(known) if self.size(name) == (self._outputs, words_of(self._inputs, bits))]
        if not fitting:
            raise InvalidWeights(
                f"tensor {name} has the shape {list(self.size(name))}, which holds no weight of the shape "
                f"{[self._outputs, self._inputs]} in {' or '.join(map(str, sorted(known)))} bits"
            )
        return fitting[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._outputs, self._inputs

    def read(self) -> QuantizedWeight:
        words = self.tensor(f"{self._path}{_PACKED}", dtypes=(torch.int32,))
        codes = codes_of(words, self._bits, self._inputs)
        stored = self.tensor(f"{self._path}.weight_scale").float()
        scales = stored.reshape(1, 1).expand(self._outputs, 1) if stored.numel() == 1 else stored
        wanted = [(self._outputs, max(1, self._inputs // size) if size > 0 else 1) for size in sorted(self._sizes)]
        if tuple(scales.shape) not in wanted or self._inputs % scales.shape[1]:
            sizes = " or ".join("one group" if size < 0 else f"groups of {size}" for size in sorted(self._sizes))
            raise InvalidWeights(
                f"tensor {self._path}.weight_scale has the shape {list(stored.shape)}, which does not divide a weight "
                f"of the shape {[self._outputs, self._inputs]} into {sizes}"
            )
        return whole_numbers(codes, self._zeros(scales), scales, self._bits, self._groups(scales.shape[1]))

    def _zeros(self, scales: Tensor) -> Tensor | None:
        name = f"{self._path}.weight_zero_point"
        if name not in self.parts:
            return None
        count = scales.shape[1]
        stored = self.tensor(name, (self._outputs, count), (words_of(self._outputs, self._bits), count))
        if stored.dtype == torch.int32:
            return unpacked(stored, self._bits, self._outputs).float()
        return stored.float() + 2 ** (self._bits - 1)

    def _groups(self, count: int) -> Tensor | None:
        name = f"{self._path}.weight_g_idx"
        if name not in self.parts:
            return None
        groups = self.tensor(name, (self._inputs,)).long()
        if int(groups.min()) < 0 or int(groups.max()) >= count:
            raise InvalidWeights(
                f"tensor {name} has groups from {int(groups.min())} to {int(groups.max())}; there are {count}"
            )
        return groups
