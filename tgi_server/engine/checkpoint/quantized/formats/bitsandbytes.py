"""bitsandbytes (Dettmers et al. 2022 and 2023): nf4 and fp4, also double quantised, and int8.

In 4 bits a weight [N, K] is flattened: `weight`, [N * K / 2, 1] uint8 or as many bytes in another dtype, the high
nibble first, has codes of the codebook `weight.quant_map`; each block of 64 has a scale in `weight.absmax`. Double
quantised, these are codes of `weight.nested_quant_map`, with scales in `weight.nested_absmax` and an offset.
`weight.quant_state.*` is JSON in bytes.
In int8, `weight`, [N, K], has a scale for each output in `SCB`, times 127.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.source import Files, QuantizedTensor, parts_of, read, size
from tgi_server.engine.checkpoint.quantized.weight import CODES, QuantizedWeight, paired
from tgi_server.engine.errors import InvalidWeights

_STATE = ".quant_state.bitsandbytes__"
_LEVELS = 127
INT8 = "int8"
# The dtypes whose bytes may hold the codes (`bnb_4bit_quant_storage`).
_STORAGES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)


def sources(files: Files, kind: str) -> list[QuantizedTensor]:
    """kind: of all quantised weights; nf4, fp4 or INT8. Raises InvalidWeights for one of another kind."""
    found: list[QuantizedTensor] = []
    for name in files:
        weight, state, stored = name.partition(_STATE)
        if not state and not name.endswith(".SCB"):
            continue
        if (stored or INT8) != kind:
            raise InvalidWeights(
                f"tensor {name} is of a weight in {stored or INT8}, but config.json says {kind}; download it again"
            )
        found.append(_four_bits(weight, name, files) if state else _eight_bits(name.removesuffix(".SCB"), files))
    return found


def _four_bits(name: str, state_name: str, files: Files) -> QuantizedTensor:
    absmax, quant_map, *nested = (
        f"{name}.{kind}" for kind in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    )
    parts = parts_of(files, (state_name, name, absmax, quant_map), nested)
    try:
        state: Mapping[str, Any] = json.loads(bytes(files[state_name][...].tolist()))
        outputs, inputs = map(int, state["shape"])
        block, nested_block = int(state["blocksize"]), int(state.get("nested_blocksize", 256))
        if min(outputs, inputs, block, nested_block) < 1:
            raise ValueError("its shape and its sizes of blocks have to be positive")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidWeights(f"tensor {state_name} does not say how the weight is quantised: {error}") from error
    count = outputs * inputs

    def weights() -> Iterator[QuantizedWeight]:
        half = -(-count // 2)
        pairs = read(files, name, dtypes=_STORAGES).flatten().view(torch.uint8)
        if len(pairs) != half:
            raise InvalidWeights(
                f"tensor {name} has {len(pairs):,} bytes, where {half:,} are expected for a weight of the shape "
                f"{[outputs, inputs]}"
            )
        if inputs % 2:
            codes = paired(torch.stack((pairs >> 4, pairs & 15), 1).flatten()[:count].view(outputs, inputs))
        else:
            codes = (pairs >> 4 | pairs << 4).view(outputs, inputs // 2)
        codebook = read(files, quant_map, (CODES,)).float()
        # No block ends within this many inputs of an output.
        group_size = math.gcd(inputs, block)
        places = torch.arange(outputs).unsqueeze(1) * inputs + torch.arange(inputs // group_size) * group_size
        scales = block_scales(-(-count // block))[places // block]
        yield QuantizedWeight.of(codes, scales, codebook=codebook, groups=torch.arange(inputs) // group_size)

    def block_scales(blocks: int) -> Tensor:
        stored = read(files, absmax, (blocks,))
        if stored.dtype != torch.uint8:
            return stored.float()
        if len(parts) < 6:
            raise InvalidWeights(f"tensor {nested[0]} or its codebook is missing beside {absmax}")
        scales = read(files, nested[0], (-(-blocks // nested_block),)).float()
        codebook = read(files, nested[1], (256,)).float()
        offset = float(state.get("nested_offset", 0.0))
        return codebook[stored.long()] * scales.repeat_interleave(nested_block)[:blocks] + offset

    return QuantizedTensor(name, files, parts, (outputs, inputs), weights)


def _eight_bits(path: str, files: Files) -> QuantizedTensor:
    name, scales_name = f"{path}.weight", f"{path}.SCB"
    parts = parts_of(files, (scales_name, name), (f"{path}.weight_format",))

    def weights() -> Iterator[QuantizedWeight]:
        codes = read(files, name, dtypes=(torch.int8,))
        scales = read(files, scales_name, (len(codes),)).float() / _LEVELS
        yield QuantizedWeight.of(codes, scales.unsqueeze(1))

    return QuantizedTensor(name, files, parts, size(files, name), weights)
