"""Chooses kernels of linear layers by the table in the repository, so that the choice is the same at every start.

`kernels.toml` has the table; `python -m benchmarks.kernels MODEL --write` writes it from measured times. A machine that
is not in the table uses the rules at the beginning of the file.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from tgi_server.engine.checkpoint.quantized import QuantizedLinear, QuantizedWeight
from tgi_server.engine.checkpoint.quantized.weight import CODES, LINE
from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.linear.quantized import SIX_BITS, PackedQuantizedLinear, packed_kind_of

TABLE = Path(__file__).with_name("kernels.toml")
# The section for machines without a section of their own.
RULES = "rules"

# End of the names of kernels that emulate instructions, which only builds for tests have.
_EMULATED = "_emulated"
# The kernels that quantize their inputs to 8 bits. Models in float32 use them only if they are named, by the table or
# by a flag.
A8 = ("w4a8", "w6a8", "w8a8")
# The kernel that quantizes its inputs to 16 bits, for models in 16 bits; with a codebook to 14 bits.
W4A16 = "w4a16"
# The kernels that round neither inputs nor weights, as models in float32 need.
_EXACT = ("fma", "fma_dequant")
# Inputs of a group in the quantized weights with which kernels are timed.
_GROUP = 64
# Number of different outputs in the weights with which kernels are timed; further outputs repeat these.
_DISTINCT = 48


@dataclass(frozen=True, slots=True)
class Weights:
    """A kind of weights that the same kernels multiply.

    kind: "dense", or `kind_of` for quantized weights.
    dtype: dtype of the inputs. bits: bits of a weight. kernels: the engine's kernels that run on this CPU, the default
    first.
    by_name: kernels that are used only if they are named.
    make: returns a layer with these numbers of outputs and inputs, and these kernels.
    """

    kind: str
    dtype: torch.dtype
    bits: int
    kernels: tuple[str, ...]
    make: Callable[[int, int, KernelTable], PackedLinear]
    by_name: tuple[str, ...] = ()

    @classmethod
    def plain(cls, dtype: torch.dtype) -> Self:
        """Returns dense weights."""
        packed = torch.ops.oatmill.linear_pack(torch.zeros(1, 64, dtype=dtype))

        def make(outputs: int, inputs: int, table: KernelTable) -> PackedLinear:
            weight = _repeated(torch.randn(_DISTINCT, inputs, generator=_generator()).to(dtype), outputs)
            return FloatLinear(weight, None, table)

        return cls("dense", dtype, dtype.itemsize * 8, _real(torch.ops.oatmill.linear_kernels(packed)), make)

    @classmethod
    def quantized(cls, kind: str, dtype: torch.dtype) -> Self:
        """Returns quantized weights of a kind. dtype: the model's dtype."""
        bits = 4 if kind in ("int4", "codebook") else 6 if kind == SIX_BITS else 8
        codebook = {"int4": LINE, "codebook": LINE.flip(0)}.get(kind)
        codes = torch.uint8 if bits == 4 else torch.float8_e4m3fn if kind == "fp8" else torch.int8
        bits_of_code, largest = (4, 120) if bits == 4 else (8, 31 if kind == SIX_BITS else 120)

        def make(outputs: int, inputs: int, table: KernelTable) -> PackedLinear:
            scales = torch.rand(_DISTINCT, -(-inputs // _GROUP), generator=_generator()).half().float()  # as most are
            shape = _DISTINCT, inputs * bits_of_code // 8
            numbers = torch.randint(0, largest, shape, generator=_generator()).to(torch.uint8)
            zeros = torch.full((outputs, scales.shape[1]), CODES / 2 - 1) if kind == "int4" else None  # 8 is none
            packed = _repeated(numbers, outputs).view(codes)
            weight = QuantizedWeight.of(packed, _repeated(scales, outputs), zeros, codebook=codebook)
            return PackedQuantizedLinear(replace(weight, six_bits=kind == SIX_BITS), None, table)

        kernels = torch.ops.oatmill.quantized_kernels(kind)
        if dtype == torch.float32:
            kernels = [name for name in kernels if name in (*_EXACT, *A8)]
        elif kind == "codebook" and dtype != torch.bfloat16:
            kernels = [name for name in kernels if name != W4A16]
        by_name = tuple(name for name in kernels if name in A8) if dtype == torch.float32 else ()
        return cls(kind, dtype, bits, _real([name for name in kernels if name not in by_name]), make, by_name)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _repeated(rows: Tensor, outputs: int) -> Tensor:
    """Returns a tensor [outputs, ...] in which the rows are repeated."""
    return rows.repeat(-(-outputs // len(rows)), 1)[:outputs]


def _real(kernels: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in kernels if not name.endswith(_EMULATED))


def quantized_kinds(model: nn.Module) -> list[str]:
    """Returns the kinds of quantized weights that linear layers of a model have."""
    layers = (module for module in model.modules() if isinstance(module, QuantizedLinear))
    return sorted({packed_kind_of(layer.quantized) for layer in layers})


def choose_kernels(weights: Weights) -> KernelTable:
    """Returns the kernels for weights on this CPU: those of its section of the table, or else of the rules.

    The rules have several tables for a kind of weights, the best first; the first with kernels of this CPU is used.
    """
    table = tables()
    for section in (torch.ops.oatmill.isa(), RULES):
        named = table.get(section, {}).get(weights.kind, {}).get(str(weights.dtype).removeprefix("torch."), [])
        for text in [named] if isinstance(named, str) else named:
            chosen = KernelTable.of(text)
            if set(chosen.kernels) <= {*weights.kernels, *weights.by_name}:
                return chosen
    return KernelTable.of(weights.kernels[0])


def tables() -> dict[str, dict[str, dict[str, str | list[str]]]]:
    """Returns the table: by section, by kind of weights and by dtype."""
    return tomllib.loads(TABLE.read_text())
