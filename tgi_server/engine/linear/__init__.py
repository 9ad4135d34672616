"""Linear layers, y = x W^T + b: one file for each kind of weights."""

import torch

from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.linear.float import Bf16Linear, PackedLinear
from tgi_server.engine.linear.int8 import Int8Linear

__all__ = ["PackedLinear", "linear_layer"]


def linear_layer(quantize: str | None, dtype: torch.dtype, *, custom_kernels: bool) -> type[PackedLinear]:
    """Returns the kind of linear layer that holds weights of this dtype on a CPU, quantised as asked.

    Raises UnsupportedModel when there is none.
    """
    if quantize is None:
        return Bf16Linear if custom_kernels and Bf16Linear.supports(dtype) else PackedLinear
    if quantize != "int8":
        raise UnsupportedModel(f"--quantize {quantize} is not supported; on a CPU, int8 is")
    if not (custom_kernels and Int8Linear.supported()):
        raise UnsupportedModel("--quantize int8 needs a CPU with AVX-512 VNNI, and the CPU kernels; leave it out")
    return Int8Linear
