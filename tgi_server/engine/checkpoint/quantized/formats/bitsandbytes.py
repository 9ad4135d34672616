"""bitsandbytes (Dettmers et al. 2022 and 2023): nf4 and fp4, also double quantised, and int8.

In 4 bits a weight [N, K] is flattened: `weight`, [N * K / 2, 1] uint8 or as many bytes in another dtype, the high
nibble first, has codes of the codebook `weight.quant_map`; each block of 64 has a scale in `weight.absmax`. Double
quantised, these are codes of `weight.nested_quant_map`, with scales in `weight.nested_absmax` and an offset.
`weight.quant_state.*` is JSON in bytes.
In int8, `weight`, [N, K], has a scale for each output in `SCB`, times 127.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.source import Files, QuantizedSource
from tgi_server.engine.checkpoint.quantized.weight import CODES, QuantizedWeight, paired
from tgi_server.engine.errors import InvalidWeights

_STATE = ".quant_state.bitsandbytes__"
_LEVELS = 127
INT8 = "int8"
# The dtypes whose bytes may hold the codes (`bnb_4bit_quant_storage`).
_STORAGES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)


def sources(files: Files, kind: str) -> list[QuantizedSource]:
    """kind: of all quantised weights; nf4, fp4 or INT8. Raises InvalidWeights for one of another kind."""
    found: list[QuantizedSource] = []
    for name in files:
        weight, state, stored = name.partition(_STATE)
        if not state and not name.endswith(".SCB"):
            continue
        if (stored or INT8) != kind:
            raise InvalidWeights(
                f"tensor {name} is of a weight in {stored or INT8}, but config.json says {kind}; download it again"
            )
        found.append(_FourBits(weight, name, files) if state else _EightBits(name.removesuffix(".SCB"), files))
    return found


class _FourBits(QuantizedSource):
    def __init__(self, name: str, state: str, files: Files) -> None:
        kinds = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        parts = tuple(f"{name}.{kind}" for kind in kinds if f"{name}.{kind}" in files)
        for needed in (name, f"{name}.absmax", f"{name}.quant_map"):
            if needed not in files:
                raise InvalidWeights(f"tensor {needed} is missing beside {state}")
        super().__init__(name, (name, state, *parts), files)
        try:
            self._state: Mapping[str, Any] = json.loads(bytes(files[state][...].tolist()))
            self._outputs, self._inputs = map(int, self._state["shape"])
            self._block = int(self._state["blocksize"])
            self._nested_block = int(self._state.get("nested_blocksize", 256))
            if min(self._outputs, self._inputs, self._block, self._nested_block) < 1:
                raise ValueError("its shape and its sizes of blocks have to be positive")
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidWeights(f"tensor {state} does not say how the weight is quantised: {error}") from error

    @property
    def shape(self) -> tuple[int, ...]:
        return self._outputs, self._inputs

    def read(self) -> QuantizedWeight:
        outputs, inputs = self._outputs, self._inputs
        count = outputs * inputs
        half = -(-count // 2)
        pairs = self.tensor(self.name, dtypes=_STORAGES).flatten().view(torch.uint8)
        if len(pairs) != half:
            raise InvalidWeights(
                f"tensor {self.name} has {len(pairs):,} bytes, where {half:,} are expected for a weight of the shape "
                f"{[outputs, inputs]}"
            )
        if inputs % 2:
            codes = paired(torch.stack((pairs >> 4, pairs & 15), 1).flatten()[:count].view(outputs, inputs))
        else:
            codes = (pairs >> 4 | pairs << 4).view(outputs, inputs // 2)
        codebook = self.tensor(f"{self.name}.quant_map", (CODES,)).float()
        # No block ends inside of so many inputs of an output.
        size = math.gcd(inputs, self._block)
        places = torch.arange(outputs).unsqueeze(1) * inputs + torch.arange(inputs // size) * size
        scales = self._scales(-(-count // self._block))[places // self._block]
        groups = torch.arange(inputs) // size
        return QuantizedWeight.of(codes, scales, codebook=codebook, groups=groups)

    def _scales(self, blocks: int) -> Tensor:
        stored = self.tensor(f"{self.name}.absmax", (blocks,))
        if stored.dtype != torch.uint8:
            return stored.float()
        name = f"{self.name}.nested_absmax"
        if name not in self.parts or f"{self.name}.nested_quant_map" not in self.parts:
            raise InvalidWeights(f"tensor {name} or its codebook is missing beside {self.name}.absmax")
        size = self._nested_block
        nested = self.tensor(name, (-(-blocks // size),)).float().repeat_interleave(size)[:blocks]
        codebook = self.tensor(f"{self.name}.nested_quant_map", (256,)).float()
        return codebook[stored.long()] * nested + float(self._state.get("nested_offset", 0.0))


class _EightBits(QuantizedSource):
    def __init__(self, path: str, files: Files) -> None:
        name = f"{path}.weight"
        if name not in files:
            raise InvalidWeights(f"tensor {name} is missing beside {path}.SCB")
        layout = f"{path}.weight_format"
        super().__init__(name, (name, f"{path}.SCB", *([layout] if layout in files else [])), files)
        self._scales = f"{path}.SCB"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size(self.name)

    def read(self) -> QuantizedWeight:
        codes = self.tensor(self.name, dtypes=(torch.int8,))
        scales = self.tensor(self._scales, (len(codes),)).float() / _LEVELS
        return QuantizedWeight.of(codes, scales.unsqueeze(1))
