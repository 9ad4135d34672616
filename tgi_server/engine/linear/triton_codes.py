"""Linear layers with weights of 4 or 8 bits on a GPU: one Triton kernel for all kinds of codes, for few rows and many.

A program takes some rows and some outputs, and goes over the inputs block by block. The inputs of a block belong to one
group; its codes become numbers of the input's dtype on their way from memory, and tensor cores multiply these.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from tgi_server.engine.linear.base import PackedCodes
from tgi_server.engine.linear.coded import kind_of, narrowed
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.quantization import QuantizedWeight
from tgi_server.engine.quantization.fp8 import E4M3_UNIT, decoded

# Inputs of a block; of more, registers run out. Groups are filled up to whole blocks; the larger ones are taken if that
# adds but a sixteenth.
_BLOCKS = (64, 32)
_FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The rows and outputs of a program, and how it is compiled."""

    rows: int
    outputs: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, itemsize: int) -> Self:
        """rows: of the input. itemsize: bytes of its numbers."""
        if itemsize == 4:  # no tensor cores: products take longer than loads, and more registers
            return cls(16, 32, warps=8, stages=1)
        if rows <= _FEW_ROWS:
            return cls(16, 32, warps=4, stages=4)
        return cls(64, 64, warps=4, stages=3) if rows <= 64 else cls(128, 64, warps=8, stages=3)


class TritonLinear(PackedCodes):
    """y = x W^T + b with W as codes; sums are in float32."""

    def _pack(self, weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable | None) -> None:  # type: ignore[override]
        self._kind = kind_of(weight)
        self.block, self._order, self._groups = arrangement(weight.groups)
        places, codes = self.block * len(self._groups), weight.single_codes
        if self._order is None:
            codes = pad(codes, (0, places - self.in_features))
        else:
            codes = pad(codes, (0, 1))[:, self._order]
        blocks = codes.unflatten(1, (-1, self.block)).transpose(0, 1)
        if weight.codebook is not None:  # the first half of a block is in the low bits
            low, high = blocks.chunk(2, dim=2)
            blocks = low | high << 4
        self._codes = blocks.contiguous()  # [blocks, outputs, bytes of a block]
        if self._kind == "int8":
            self._codes = self._codes.view(torch.int8)
        self._scales = narrowed(weight.scales.T.contiguous())  # [groups, outputs], as the zeros
        self._zeros = None if weight.zeros is None else narrowed(weight.zeros.T.contiguous())
        self._codebook = weight.codebook if self._kind == "codebook" else None
        self._bias = None if bias is None else bias.float()

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        identity = torch.eye(self.in_features, dtype=self.weight.dtype, device=self.weight.device)
        return self._multiply(identity, None).T.contiguous(), self._bias

    def forward(self, x: Tensor, activation: str = "none") -> Tensor:
        return self._multiply(x, self._bias, relu=activation == "relu")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._multiply(x, self._bias, residual.contiguous())

    def _multiply(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, *, relu: bool = False
    ) -> Tensor:
        y = x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, self.in_features)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        shape = ProductTile.of(len(rows), x.element_size())
        grid = triton.cdiv(self.out_features, shape.outputs), triton.cdiv(len(rows), shape.rows)
        _multiply_codes[grid](
            rows, self._codes, self._scales, self._zeros, self._codebook, self._groups, self._order, bias, residual, y,
            len(rows), self.out_features, self.in_features, len(self._groups), rows.stride(0),
            kind=self._kind, block=self.block, width=self._codes.shape[2], relu=relu,
            own_rows=shape.rows, own_outputs=shape.outputs, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        return y


def arrangement(groups: Tensor) -> tuple[int, Tensor | None, Tensor]:
    """Arranges inputs in blocks, each with inputs of one group.

    groups: [inputs], of each input. Returns the number of inputs in a block; the input that stands at each place,
    `inputs` for none, or None where all stand where they were; and the group of each block, int32.
    """
    inputs, counts = len(groups), groups.bincount()
    blocks = {size: -(-counts // size) for size in _BLOCKS}
    most = int(blocks[_BLOCKS[-1]].sum()) * _BLOCKS[-1] * 17 // 16
    size = next(size for size, of_group in blocks.items() if int(of_group.sum()) * size <= most)
    of_group = blocks[size]
    group_of_block = torch.arange(len(counts), device=groups.device).repeat_interleave(of_group).int()
    sorted_inputs = groups.argsort(stable=True)
    added = ((of_group * size).cumsum(0) - of_group * size) - (counts.cumsum(0) - counts)
    order = torch.full((len(group_of_block) * size,), inputs, device=groups.device)
    order[torch.arange(inputs, device=groups.device) + added[groups[sorted_inputs]]] = sorted_inputs
    kept = torch.equal(order[:inputs], torch.arange(inputs, device=groups.device))
    return size, None if kept else order, group_of_block


@triton.jit(do_not_specialize=["rows"])  # or some numbers of rows would be compiled for while requests wait
def _multiply_codes(
    x, codes, scales, zeros, codebook, groups, order, bias, residual, y, rows, outputs, inputs, blocks, x_stride,
    kind: tl.constexpr, block: tl.constexpr, width: tl.constexpr, own_rows: tl.constexpr, own_outputs: tl.constexpr,
    relu: tl.constexpr,
):  # fmt: skip
    """y = x W^T + bias of some rows and some outputs. width: bytes of a block's codes of one output."""
    row = tl.program_id(1) * own_rows + tl.arange(0, own_rows)
    output = tl.program_id(0) * own_outputs + tl.arange(0, own_outputs)
    place = tl.arange(0, width)
    real_rows, real_outputs = row < rows, output < outputs
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([own_rows, own_outputs], tl.float32)
    for index in range(0, blocks):
        at = tl.load(groups + index) * outputs + output
        scale = tl.load(scales + at, mask=real_outputs, other=0.0).to(tl.float32)[:, None]
        zero = scale * 0.0
        if zeros is not None:
            zero = tl.load(zeros + at, mask=real_outputs, other=0.0).to(tl.float32)[:, None]
        own_codes = codes + (index * outputs + output).to(tl.int64)[:, None] * width
        read = tl.load(own_codes + place[None, :], mask=real_outputs[:, None], other=0)
        part = read & 15 if width < block else read
        column = index * block + place
        own = _inputs(x_rows, order, column, inputs, real_rows)
        weights = ((_numbers(part, codebook, kind) - zero) * scale).to(own.dtype)
        sums = tl.dot(own, tl.trans(weights), sums, input_precision="ieee")
        if width < block:
            own = _inputs(x_rows, order, column + width, inputs, real_rows)
            weights = ((_numbers(read >> 4, codebook, kind) - zero) * scale).to(own.dtype)
            sums = tl.dot(own, tl.trans(weights), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + output, mask=real_outputs, other=0.0)[None, :]
    if relu:
        sums = tl.maximum(sums, 0.0)
    target = row.to(tl.int64)[:, None] * outputs + output[None, :]
    real = real_rows[:, None] & real_outputs[None, :]
    if residual is not None:
        sums += tl.load(residual + target, mask=real, other=0.0).to(tl.float32)
    tl.store(y + target, sums.to(y.dtype.element_ty), mask=real)


@triton.jit
def _inputs(x_rows, order, place, inputs, real_rows):
    """Returns what stands at some places of some rows, with zeros where there is nothing."""
    column = place
    if order is not None:
        column = tl.load(order + place)
    return tl.load(x_rows + column[None, :], mask=real_rows[:, None] & (column < inputs)[None, :], other=0.0)


@triton.jit
def _numbers(codes, codebook, kind: tl.constexpr):
    """Returns the float32 numbers that codes of a kind stand for."""
    if kind == "codebook":
        numbers = tl.load(codebook + codes.to(tl.int32))
    elif kind == "fp8":
        numbers = decoded(codes, 3).to(tl.float32) * E4M3_UNIT
    else:
        numbers = codes.to(tl.float32)
    return numbers
