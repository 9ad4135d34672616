"""The part of torchvision that two image processors of `transformers` call, in plain torch.

torchvision itself need not be installed: what PyPI has does not load beside torch for CPUs.
"""

import sys
from collections.abc import Sequence
from enum import Enum
from types import ModuleType
from typing import Any


class InterpolationMode(Enum):
    """torchvision's names of interpolations, with the names of torch."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(images: Any, size: Sequence[int], interpolation: InterpolationMode, antialias: bool = True) -> Any:
    """images: [..., channels, height, width], bytes or floats. torch rounds bytes as torchvision does."""
    from torch.nn.functional import interpolate

    batch = images.reshape(-1, *images.shape[-3:])
    resized = interpolate(batch, size=list(size), mode=interpolation.value, antialias=antialias)
    return resized.reshape(*images.shape[:-2], *size)


def normalize(images: Any, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> Any:
    """images: [..., channels, height, width], of floats."""
    from torch import as_tensor

    centre, scale = (as_tensor(values, dtype=images.dtype)[:, None, None] for values in (mean, std))
    return (images - centre) / scale


def pad(images: Any, padding: Sequence[int], fill: Any = 0, padding_mode: str = "constant") -> Any:
    """Adds black pixels. padding: left, top, right, bottom."""
    from torch.nn.functional import pad as pad_edges

    left, top, right, bottom = padding
    return pad_edges(images, (left, right, top, bottom), value=0)


def install() -> None:
    """Puts the functions where `transformers` looks for torchvision's. To be called once `transformers` is imported."""
    from PIL.Image import Resampling
    from transformers import image_processing_backends

    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        sys.modules[name] = ModuleType(name)
    sys.modules["torchvision.transforms.v2"].functional = sys.modules[__name__]  # type: ignore[attr-defined]
    image_processing_backends.tvF = sys.modules[__name__]
    image_processing_backends.pil_torch_interpolation_mapping = {
        Resampling[mode.name]: mode for mode in InterpolationMode
    }
