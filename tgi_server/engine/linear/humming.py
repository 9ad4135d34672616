"""Linear layers with weights of 4 bits on a GPU, by the library `humming-kernels` (the extra `cuda`).

It compiles kernels for each shape of a weight, with NVRTC, and keeps them in its cache on disk (HUMMING_CACHE_DIR).
"""

import json
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized import QuantizedLinear, QuantizedWeight
from tgi_server.engine.linear.base import PackedQuantized
from tgi_server.engine.linear.kernel_table import KernelTable

HUMMING = "humming"
# The library's zero point if none is given.
_MIDDLE = 8
# Outputs and inputs must be multiples of this.
_UNIT = 128
_CODES_OF_WORD = 8
# Upper bounds of the ranges of rows; a kernel is compiled for each range, and the last one has no upper bound. By
# default the library compiles one for about every 8 rows, 33 for each shape, which takes minutes on few cores.
ROW_CLASSES = (8, 16, 32, 64, 128, 256, 4096)
_ANY_ROWS = 1 << 30


def takes(module: QuantizedLinear, dtype: torch.dtype) -> bool:
    """Returns True if the library is installed and the layer has 4-bit integers, integer zeros and no act-order."""
    weight = module.quantized
    sizes = module.out_features % _UNIT, module.in_features % _UNIT, weight.group_size
    if find_spec("humming") is None or dtype is torch.float32 or sizes[:2] != (0, 0) or not sizes[2]:
        return False
    zeros = weight.without_offsets().zeros
    return zeros is None or bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros < 16)).all())


class HummingLinear(PackedQuantized):
    """y = x W^T + b with W in 4 bits; x and y in 16."""

    def _pack(self, weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable | None) -> None:  # type: ignore[override]
        from humming.layer import HummingLayer

        weight = weight.without_offsets()
        device, dtype = weight.codes.device, self.weight.dtype
        zeros = torch.zeros_like(weight.scales) if weight.zeros is None else weight.zeros
        tensors = {"weight": weight.codes.contiguous().view(torch.int32), "weight_scale": weight.scales.to(dtype)}
        has_zeros = bool((zeros != _MIDDLE).any())
        if has_zeros:
            tensors["zero_point"] = _packed(zeros)
        if bias is not None:
            tensors["bias"] = bias.to(dtype)
        groups = weight.scales.shape[1]
        config = {
            "dtype": "uint4",
            "group_size": 0 if groups == 1 else self.in_features // groups,
            "has_zero_point": has_zeros,
        }
        self._bias = None if bias is None else bias.float()
        layer = HummingLayer(
            shape_n=self.out_features,
            shape_k=self.in_features,
            weight_config=config,
            has_bias=bias is not None,
            torch_dtype=dtype,
        )
        self._layer = layer.to(device)
        self._layer.load_from_tensors(tensors)
        self._layer.transform()
        self._kernels = _kernels_by_rows(self._layer.humming_config, device)

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        identity = torch.eye(self.in_features, dtype=self.weight.dtype, device=self.weight.device)
        dense = self._multiply(identity)
        if self._bias is not None:
            dense = dense - self._bias.to(dense.dtype)
        return dense.T.contiguous(), self._bias

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self._multiply(x.reshape(-1, self.in_features).contiguous()).view(*x.shape[:-1], self.out_features)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.forward(x).add_(residual)

    def _multiply(self, rows: Tensor) -> Tensor:
        y: Tensor = self._layer(rows, tuning_config=self._kernels)
        return y


def _kernels_by_rows(layer_config: Any, device: torch.device) -> str:
    """Returns the kernels of a layer, one for each class of rows, as the library's JSON."""
    from humming.tune import get_heuristics_config

    bounds = pairwise((0, *ROW_CLASSES[:-1], _ANY_ROWS))
    return json.dumps(
        [
            [after, last, get_heuristics_config(layer_config, shape_m=rows, device=device)]
            for (after, last), rows in zip(bounds, ROW_CLASSES, strict=True)
        ]
    )


def _packed(zeros: Tensor) -> Tensor:
    """Returns zero points, [outputs, groups], eight of neighbouring outputs in a word: [outputs / 8, groups] int32."""
    by_word = zeros.to(torch.int32).unflatten(0, (-1, _CODES_OF_WORD))
    words = torch.zeros_like(by_word[:, 0])
    for number in range(_CODES_OF_WORD):
        words |= by_word[:, number] << (4 * number)
    return words.contiguous()
