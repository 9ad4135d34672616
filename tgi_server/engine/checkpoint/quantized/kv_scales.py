"""Reads the scales for keys and values in FP8 from checkpoints."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tgi_server.engine.errors import InvalidWeights

# By the end of a tensor's name: of compressed-tensors and of vLLM, of older llm-compressor, and of TGI's first scales.
_KEYS = (".k_scale", ".k_proj.output_scale")
_VALUES = (".v_scale", ".v_proj.output_scale")
_BOTH = (".kv_scale",)


class KVScales(NamedTuple):
    """The factors by which a layer's numbers in the KV cache are multiplied to give its keys and values."""

    keys: float = 1.0
    values: float = 1.0


def read_kv_scales(tensors: Mapping[str, Any]) -> dict[int, KVScales]:
    """Returns the scales of a checkpoint's layers that have some, by the layer's number.

    tensors: by their names; `[...]` reads one. Raises InvalidWeights for what is not one scale for a layer.
    """
    found: dict[int, KVScales] = {}
    for name in tensors:
        if not name.endswith(_KEYS + _VALUES + _BOTH):
            continue
        scale, layer = _scale(name, tensors[name][...]), _layer(name)
        own = found.get(layer, KVScales())
        if name.endswith(_BOTH):
            found[layer] = KVScales(scale, scale)
        elif name.endswith(_KEYS):
            found[layer] = own._replace(keys=scale)
        else:
            found[layer] = own._replace(values=scale)
    return found


def _scale(name: str, tensor: Any) -> float:
    if tensor.numel() != 1:
        raise InvalidWeights(
            f"tensor {name} has the shape {list(tensor.shape)}; of a KV cache one scale for all heads of a layer is "
            "read, so leave --kv-cache-dtype out"
        )
    scale = float(tensor)
    if not 0 < scale < math.inf:
        raise InvalidWeights(f"tensor {name} is {scale}; a scale is a positive number. Is the download complete?")
    return scale


def _layer(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise InvalidWeights(f"tensor {name} does not name its layer; leave --kv-cache-dtype out")
    return numbers[0]
