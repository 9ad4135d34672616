"""AWQ (Lin et al. 2023), in the layout that AutoAWQ calls gemm.

Of a layer with K inputs and N outputs: `qweight`, [K, N / 8] int32, in which nibble i of a word is output _ORDER[i] of
eight; `qzeros`, [groups, N / 8], alike; `scales`, [groups, N].
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.formats.by_layer import group_size_of, layer_settings
from tgi_server.engine.checkpoint.quantized.source import (
    FLOATS,
    Files,
    QuantizedTensor,
    parts_of,
    read,
    size,
    whole_numbers,
)
from tgi_server.engine.checkpoint.quantized.weight import QuantizedWeight, paired
from tgi_server.engine.errors import UnsupportedModel

BITS = 4
_PLACES = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """group_size: inputs that share a scale; None: all. others: those of layers that differ."""

    group_size: int | None
    others: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "AwqFormat":
        """Raises UnsupportedModel for what is not read."""
        version = str(settings.get("version") or "gemm").lower()
        if version != "gemm":
            raise UnsupportedModel(
                f"the AWQ checkpoint has the layout {version}; take the same model in the layout gemm"
            )
        bits = int(settings.get("bits") or settings.get("w_bit") or BITS)
        if bits != BITS:
            raise UnsupportedModel(f"the AWQ checkpoint has {bits} bits; {BITS} can be read")
        size = int(settings.get("group_size") or settings.get("q_group_size") or -1)
        others = tuple(size for _, size in layer_settings(settings, (BITS,)))
        return cls(size if size > 0 else None, others)

    def __str__(self) -> str:
        groups = f"groups of {self.group_size}" if self.group_size else "one group"
        return f"AWQ, {BITS} bits, {groups}" + (", others in some layers" if self.others else "")


def sources(files: Files, settings: AwqFormat) -> list[QuantizedTensor]:
    return [_source(name.removesuffix(".qweight"), files, settings) for name in files if name.endswith(".qweight")]


def _source(path: str, files: Files, settings: AwqFormat) -> QuantizedTensor:
    parts = parts_of(files, [f"{path}.{part}" for part in ("qweight", "qzeros", "scales")])
    inputs, words = size(files, parts[0])
    outputs = words * _PLACES

    def weights() -> Iterator[QuantizedWeight]:
        group_size = settings.group_size or inputs
        if settings.others:
            sizes = [settings.group_size, *(size if size > 0 else None for size in settings.others if size)]
            group_size = group_size_of(parts[1], inputs, size(files, parts[1])[0], sizes)
        count = -(-inputs // group_size)
        codes = read(files, parts[0], (inputs, words), dtypes=(torch.int32,))
        zeros = read(files, parts[1], (count, words), dtypes=(torch.int32,))
        scales = read(files, parts[2], (count, outputs), dtypes=FLOATS)
        groups = torch.arange(inputs) // group_size
        yield whole_numbers(paired(_unpacked(codes)), _unpacked(zeros), scales.T.float(), BITS, groups)

    return QuantizedTensor(f"{path}.weight", files, parts, (outputs, inputs), weights)


def _unpacked(words: Tensor) -> Tensor:
    """Returns [outputs, n] uint8 of words, [n, outputs / 8]."""
    numbers = torch.empty(words.shape[1], _PLACES, len(words), dtype=torch.uint8)
    by_output = words.T.contiguous()
    for nibble, output in enumerate(_ORDER):
        numbers[:, output] = (by_output >> BITS * nibble) & 15
    return numbers.flatten(0, 1)
