"""The number format of a KV cache: the model's dtype, or FP8 with a scale for each layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.kv_scales import KVScales

_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The format in which keys and values are stored.

    dtype: the model's, or an FP8 dtype; then cached numbers times their layer's scale are the keys or values.
    scales: by layer; a missing layer has scales of 1.
    """

    dtype: torch.dtype
    scales: Mapping[int, KVScales] = field(default_factory=dict)

    @property
    def mantissa(self) -> int:
        """The bits of an FP8 number's mantissa; 0: the numbers are the model's."""
        return _MANTISSA.get(self.dtype, 0)

    @property
    def fp8(self) -> bool:
        return self.mantissa > 0

    @property
    def storage(self) -> torch.dtype:
        """The dtype of tensors of cached numbers, which torch copies and gathers: it has few operations for FP8."""
        return torch.uint8 if self.fp8 else self.dtype

    def of(self, layer: int) -> KVScales:
        return self.scales.get(layer, KVScales())

    def encode(self, numbers: Tensor, scale: float) -> Tensor:
        """Returns numbers in the stored format: rounded to nearest, and clamped to the largest."""
        if not self.fp8:
            return numbers
        most = torch.finfo(self.dtype).max
        return (numbers.float() / scale).clamp(-most, most).to(self.dtype).view(torch.uint8)

    def decode(self, kept: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Returns the keys or values of stored numbers."""
        if not self.fp8:
            return kept
        return (kept.view(self.dtype).float() * scale).to(dtype)
