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
    scales: the scales of each layer; a missing layer has scales of 1. key_dtype: the model's dtype if only values are
    in FP8; None: keys have the dtype of values.
    """

    dtype: torch.dtype
    scales: Mapping[int, KVScales] = field(default_factory=dict)
    key_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        """Returns the format, for people."""
        values, keys = (_name(dtype) for dtype in (self.dtype, self.keys))
        return values if keys == values else f"{values} (keys: {keys})"

    @property
    def keys(self) -> torch.dtype:
        return self.key_dtype or self.dtype

    @property
    def mantissa(self) -> int:
        """The bits of an FP8 number's mantissa; 0: the numbers are the model's."""
        return _MANTISSA.get(self.dtype, 0)

    @property
    def fp8(self) -> bool:
        return self.mantissa > 0

    def of(self, layer: int) -> KVScales:
        """Returns the scales of a layer; numbers of the model's dtype have none."""
        scales = self.scales.get(layer, KVScales())
        return scales if self.keys in _MANTISSA else scales._replace(keys=1.0)


def _name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in flags."""
    return str(dtype).removeprefix("torch.").replace("float8", "fp8")


def storage(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the cache's tensors: bytes for FP8, for which torch has few operations."""
    return torch.uint8 if dtype in _MANTISSA else dtype


def encode(numbers: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns numbers in their stored form: in FP8 rounded to nearest, and clamped to the largest number."""
    if dtype not in _MANTISSA:
        return numbers
    most = torch.finfo(dtype).max
    return (numbers.float() / scale).clamp(-most, most).to(dtype).view(torch.uint8)


def decode(kept: Tensor, scale: float, dtype: torch.dtype, like: torch.dtype) -> Tensor:
    """Returns keys or values in the dtype `like` from their stored form."""
    if dtype not in _MANTISSA:
        return kept
    return (kept.view(dtype).float() * scale).to(like)
