"""The metadata of a GGUF file, by their names without that of the architecture."""

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
        if isinstance(found, list) and found and all(each == found[0] for each in found):
            found = found[0]
        if not isinstance(found, int | float):
            what = "differs between layers, which is not served" if isinstance(found, list) else f"is {found!r}"
            raise GgufError(f"{self.file.path}: {self.file.architecture}.{name} {what}; a number is needed")
        return found

    def most(self, name: str, default: Any = None) -> Any:
        """Returns the largest of the layers' numbers."""
        found = self.get(name, default)
        return max(found, default=default) if isinstance(found, list) else self.number(name, default)

    def least(self, name: str) -> Any:
        """Returns the smallest of the layers' numbers."""
        found = self.get(name)
        return min(found) if isinstance(found, list) and found else self.number(name)

    def of_layers(self, name: str, default: Any = None) -> list[Any]:
        """Returns a value for each layer."""
        found = self.get(name, default)
        return found[: self.layers] if isinstance(found, list) else [found] * self.layers

    @property
    def layers(self) -> int:
        """The number of layers, without those that only draft."""
        return int(self.number("block_count") - self.get("nextn_predict_layers", 0))

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def values(self, tensor: str) -> list[float]:
        """Returns the numbers of a tensor in float32."""
        found = self.file.tensors[tensor]
        if found.kind is not GGMLQuantizationType.F32:
            raise GgufError(f"{self.file.path}: tensor {tensor} is of {found.kind.name}; F32 is needed")
        return [float(each) for each in found.raw.view(np.float32).ravel()]

    @property
    def head_dim(self) -> int:
        own = self.get("attention.key_length")
        return int(own or self.number("embedding_length") // (self.number("attention.head_count") or 1))

    def layers_with(self, tensor: str) -> list[int]:
        """Returns the numbers of the layers that have a tensor."""
        return [layer for layer in range(self.layers) if self.has(f"blk.{layer}.{tensor}")]


def dtype_of(file: Gguf) -> str:
    """Returns the dtype to compute in: that of the weights where they are not quantised, else bfloat16."""
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"
