"""The metadata of a GGUF file, by their names without that of the architecture."""

import math
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from tgi_server.gguf.file import Gguf
from tgi_server.gguf.paths import GgufError


class Metadata:
    """The metadata of a model, by their names without that of the architecture."""

    def __init__(self, file: Gguf) -> None:
        self.file = file

    def get(self, name: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.file.architecture}.{name}", default)

    def number(self, name: str, default: float | None = None) -> Any:
        """Returns a number, the same for all layers. Raises GgufError."""
        found = self.get(name, default)
        if isinstance(found, list) and found and all(value == found[0] for value in found):
            found = found[0]
        if not isinstance(found, int | float) or not math.isfinite(found):
            what = "differs between layers, which is not served" if isinstance(found, list) else f"is {found!r}"
            raise GgufError(f"{self._name(name)} {what}; a number is needed")
        return found

    def most(self, name: str, default: Any = None) -> Any:
        """Returns the largest of the layers' numbers. Raises GgufError."""
        return max(self._numbers(name, default))

    def least(self, name: str) -> Any:
        """Returns the smallest of the layers' numbers. Raises GgufError."""
        return min(self._numbers(name))

    def _numbers(self, name: str, default: Any = None) -> list[Any]:
        """Returns the layers' numbers, or the one of all layers."""
        found = self.get(name, default)
        if not isinstance(found, list) or not found:
            return [self.number(name, default)]
        if any(not isinstance(value, int | float) or not math.isfinite(value) for value in found):
            raise GgufError(f"{self._name(name)} is {found!r:.100}; numbers are needed")
        return found

    def of_layers(self, name: str, default: Any = None) -> list[Any]:
        """Returns a value for each layer."""
        found = self.get(name, default)
        return found[: self.layers] if isinstance(found, list) else [found] * self.layers

    @property
    def layers(self) -> int:
        """The number of layers, without those that only draft. Raises GgufError unless each may have a tensor."""
        count, most = self.number("block_count"), len(self.file.tensors)
        if not isinstance(count, int) or not 1 <= count <= most:
            raise GgufError(f"{self._name('block_count')} is {count}; a whole number from 1 to {most} is needed")
        drafting = self.number("nextn_predict_layers", 0)
        if drafting not in range(count):
            raise GgufError(f"{self._name('nextn_predict_layers')} is {drafting}; there are {count} layers in all")
        return int(count - drafting)

    def _name(self, name: str) -> str:
        return f"{self.file.path}: {self.file.architecture}.{name}"

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def values(self, tensor: str) -> list[float]:
        """Returns the numbers of a tensor in float32."""
        found = self.file.tensors[tensor]
        if found.kind is not GGMLQuantizationType.F32:
            raise GgufError(f"{self.file.path}: tensor {tensor} is of {found.kind.name}; F32 is needed")
        return [float(value) for value in found.raw.view(np.float32).ravel()]

    @property
    def head_dim(self) -> int:
        own = self.get("attention.key_length")
        return int(own or self.number("embedding_length") // (self.number("attention.head_count") or 1))

    def layers_with(self, tensor: str) -> list[int]:
        """Returns the numbers of the layers that have a tensor."""
        return [layer for layer in range(self.layers) if self.has(f"blk.{layer}.{tensor}")]


def dtype_of(file: Gguf) -> str:
    """Returns the dtype to compute in: that of the weights where they are not quantized, else bfloat16."""
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"
