"""Linear layers whose dense weights are rounded to 8 bits when they are packed, one scale for each output."""

from torch import Tensor

from tgi_server.engine.checkpoint.quantized import QuantizedWeight
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDED_AT_ONCE, ROUNDINGS
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.linear.quantized import PackedQuantizedLinear
from tgi_server.engine.memory import read_once


class Int8Linear(PackedQuantizedLinear):
    """y = x W^T + b with W rounded to 8 bits; kernels that quantize x have a scale for each group of its inputs."""

    rounding = 0.3

    def __init__(self, weight: Tensor, bias: Tensor | None = None, kernels: KernelTable | None = None) -> None:
        """weight: [out_features, in_features]; the layer keeps no reference to it. bias: [out_features]."""
        _, rounded = ROUNDINGS["int8"]
        rows = max(1, ROUNDED_AT_ONCE // weight.shape[1])
        parts = [rounded(part.float()) for part in read_once(weight, rows)]
        super().__init__(QuantizedWeight.joined(parts), bias, kernels, weight.dtype)
