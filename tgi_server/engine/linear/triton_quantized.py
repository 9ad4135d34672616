"""Linear layers with weights of 4 or 8 bits on a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_server.engine.checkpoint.quantized import QuantizedWeight
from tgi_server.engine.kernels.triton.w4a16_gemm import WORDS, bits_of, dequantize, multiply
from tgi_server.engine.linear.base import PackedQuantized
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.linear.quantized import kind_of, narrowed

# Possible inputs of a block, and the dtype of its words, by the bits of a code. Groups are padded to whole blocks; the
# larger blocks are used if they add at most a sixteenth.
_BLOCKS = {
    4: {128: torch.int32, 64: torch.int16, 32: torch.uint8},
    8: {64: torch.int32, 32: torch.int16},
}


class TritonLinear(PackedQuantized):
    """y = x W^T + b with W quantized; accumulators are float32."""

    def _pack(self, weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable | None) -> None:  # type: ignore[override]
        weight = weight.without_offsets()
        self._kind = kind_of(weight)
        bits = bits_of(self._kind)
        self.block, self._order, self._groups = arrangement(weight.groups, tuple(_BLOCKS[bits]))
        places, codes = self.block * len(self._groups), weight.single_codes
        if self._order is None:
            codes = pad(codes, (0, places - self.in_features))
        else:
            codes = pad(codes, (0, 1))[:, self._order]
        self._codes = _words(codes.unflatten(1, (-1, self.block)).transpose(0, 1), bits)
        self._scales = narrowed(weight.scales.T.contiguous())  # [groups, outputs], as the zeros
        self._zeros = None if weight.zeros is None else narrowed(weight.zeros.T.contiguous())
        self._codebook = weight.codebook if self._kind == "codebook" else None
        self._bias = None if bias is None else bias.float()

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the weights of some outputs, [rows, in_features]. indices: [rows] int64."""
        zeros = None if self._zeros is None else self._zeros[:, indices]
        found = dequantize(
            self._codes[:, indices], self._scales[:, indices], zeros, self._codebook, self._groups,
            kind=self._kind, block=self.block, dtype=dtype,
        )  # fmt: skip
        if self._order is None:
            return found[:, : self.in_features]
        return torch.empty_like(found).index_copy_(1, self._order, found)[:, : self.in_features]

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        identity = torch.eye(self.in_features, dtype=self.weight.dtype, device=self.weight.device)
        return self._multiply(identity, None).T.contiguous(), self._bias

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._multiply(x, self._bias, residual.contiguous())

    def _multiply(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        return multiply(
            x, self._codes, self._scales, self._zeros, self._codebook, self._groups, self._order, bias, residual,
            kind=self._kind, block=self.block,
        )  # fmt: skip


def _words(codes: Tensor, bits: int) -> Tensor:
    """Returns codes, [blocks, outputs, inputs of a block], in words, [blocks, outputs, WORDS]."""
    words = torch.zeros(*codes.shape[:2], WORDS, dtype=_BLOCKS[bits][codes.shape[2]], device=codes.device)
    unsigned = codes.view(torch.uint8).unflatten(2, (-1, WORDS))
    for number, part in enumerate(unsigned.unbind(2)):
        words |= part.to(words.dtype) << (number * bits)
    return words


def arrangement(groups: Tensor, sizes: Sequence[int]) -> tuple[int, Tensor | None, Tensor]:
    """Arranges inputs in blocks, each with inputs of one group.

    groups: [inputs], the group of each input. sizes: possible sizes of a block, the largest first. Returns the number
    of inputs in a block; the input at each place (`inputs`: padding), or None if the order is unchanged; and the group
    of each block, int32.
    """
    inputs, counts = len(groups), groups.bincount()
    blocks = {size: -(-counts // size) for size in sizes}
    most = int(blocks[sizes[-1]].sum()) * sizes[-1] * 17 // 16
    size = next(size for size, of_group in blocks.items() if int(of_group.sum()) * size <= most)
    of_group = blocks[size]
    group_of_block = torch.arange(len(counts), device=groups.device).repeat_interleave(of_group).int()
    sorted_inputs = groups.argsort(stable=True)
    added = ((of_group * size).cumsum(0) - of_group * size) - (counts.cumsum(0) - counts)
    order = torch.full((len(group_of_block) * size,), inputs, device=groups.device)
    order[torch.arange(inputs, device=groups.device) + added[groups[sorted_inputs]]] = sorted_inputs
    kept = torch.equal(order[:inputs], torch.arange(inputs, device=groups.device))
    return size, None if kept else order, group_of_block
