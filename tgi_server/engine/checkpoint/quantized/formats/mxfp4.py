"""MXFP4 (OCP Microscaling Formats, 1.0), in the layout of gpt-oss: the experts of a layer in one tensor.

`NAME_blocks`, [experts, outputs, inputs / 32, 16] uint8, has two codes of 4 bits in a byte, the low one first;
`NAME_scales`, [experts, outputs, inputs / 32], exponents of 2, stored with 127 added; 255 is NaN. Together they are the
model's parameter NAME, [experts, inputs, outputs].
"""

from collections.abc import Iterator

import torch

from tgi_server.engine.checkpoint.quantized.source import Files, QuantizedTensor, parts_of, read, size
from tgi_server.engine.checkpoint.quantized.weight import QuantizedWeight
from tgi_server.engine.errors import InvalidWeights

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16
_BIAS = 127
_NAN = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The numbers of 4 bits with 2 bits of exponent and 1 of mantissa.
CODEBOOK = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])


def sources(files: Files) -> list[QuantizedTensor]:
    return [_experts(name.removesuffix(_BLOCKS), files) for name in files if name.endswith(_BLOCKS)]


def _experts(name: str, files: Files) -> QuantizedTensor:
    parts = parts_of(files, (name + _BLOCKS, name + _SCALES))
    experts, outputs, blocks, bytes_ = size(files, parts[0], 4)
    inputs = blocks * bytes_ * 2

    def weights() -> Iterator[QuantizedWeight]:
        blocks = inputs // (2 * _BYTES)
        pairs = read(files, parts[0], (experts, outputs, blocks, _BYTES), dtypes=(torch.uint8,))
        exponents = read(files, parts[1], (experts, outputs, blocks), dtypes=(torch.uint8,))
        if bool((exponents == _NAN).any()):
            raise InvalidWeights(f"tensor {parts[1]} has scales that are NaN; download the folder again")
        for expert in range(experts):
            scales = torch.ldexp(torch.ones(outputs, blocks), exponents[expert].int() - _BIAS)
            yield QuantizedWeight.of(pairs[expert].flatten(1), scales, codebook=CODEBOOK)

    return QuantizedTensor(name, files, parts, (experts, inputs, outputs), weights)
