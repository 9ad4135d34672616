"""Linear layers with weights of 4 or 8 bits on a GPU."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_server.engine.checkpoint.quantized import QuantizedWeight
from tgi_server.engine.kernels.triton.w4a16_gemm import multiply
from tgi_server.engine.linear.base import PackedQuantized
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.linear.quantized import kind_of, narrowed

# Inputs of a block; of more, registers run out. Groups are filled up to whole blocks; the larger ones are taken if that
# adds but a sixteenth.
_BLOCKS = (64, 32)


class TritonLinear(PackedQuantized):
    """y = x W^T + b with W quantized; accumulators are float32."""

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
        return multiply(
            x, self._codes, self._scales, self._zeros, self._codebook, self._groups, self._order, bias, residual,
            kind=self._kind, block=self.block, relu=relu,
        )  # fmt: skip


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
