"""LoRA adapters in GGUF files, as llama.cpp writes them: two matrices for each weight, and one alpha for all.

The names: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py, class Keys.Adapter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tgi_server.gguf.architectures import ARCHITECTURES, Architecture
from tgi_server.gguf.file import Gguf, GgufTensor, read_gguf
from tgi_server.gguf.paths import GgufError

_MATRICES = ("lora_a", "lora_b")


@dataclass(frozen=True, slots=True)
class GgufAdapter:
    """An adapter. alpha: its scale times the rank; 0 stands for a scale of 1.

    matrices: [rank, inputs] and [outputs, rank], by the name of the weight in files of models.
    """

    path: Path
    architecture: Architecture
    alpha: float
    matrices: Mapping[str, tuple[GgufTensor, GgufTensor]]


def read_gguf_adapter(path: Path, model_type: str) -> GgufAdapter:
    """Reads an adapter. model_type: the `model_type` in the base model's config.json.

    Raises GgufError if the adapter is for another architecture or is not supported.
    """
    file = read_gguf(path, texts=False)
    if not file.is_adapter:
        raise GgufError(f"{path} is a model, not an adapter (general.type is {file.metadata.get('general.type')!r})")
    if (kind := file.metadata.get("adapter.type")) != "lora":
        raise GgufError(f"{path}: adapter.type is {kind!r}; only 'lora' is served")
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise GgufError(f"{path} takes effect only after its adapter.alora.invocation_tokens, which is not supported")
    alpha = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise GgufError(f"{path}: adapter.lora.alpha is {alpha!r}; a finite number is needed")
    architecture = _architecture(file, model_type)
    pairs = {name.rpartition(".")[0] for name in file.tensors}
    matrices: dict[str, tuple[GgufTensor, GgufTensor]] = {}
    for name in sorted(pairs):
        a, b = (file.tensors.get(f"{name}.{matrix}") for matrix in _MATRICES)
        if a is None or b is None:
            other = next(found for found in file.tensors if found.rpartition(".")[0] == name)
            raise GgufError(
                f"{path}: tensor {other} is not one of a pair {' and '.join(_MATRICES)}, which adapters have"
            )
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise GgufError(
                f"{path}: {name} has the matrices {list(a.shape)} and {list(b.shape)}; [rank, inputs] and "
                "[outputs, rank] are needed"
            )
        matrices[name] = a, b
    if not matrices:
        raise GgufError(f"{path} has no tensors")
    return GgufAdapter(path, architecture, float(alpha), matrices)


def _architecture(file: Gguf, model_type: str) -> Architecture:
    """Returns the architecture of the base model. Raises GgufError if it is not that of the adapter."""
    names = {name: kind for name, kind in ARCHITECTURES.items() if model_type in (kind.model_type, *kind.alike)}
    if "mixtral" in names:
        names = {"llama": names["mixtral"]}
    found = names.get(file.architecture)
    if found is None:
        raise GgufError(
            f"{file.path} is for models of the architecture {file.architecture!r} (general.architecture), and the base "
            f"model is {model_type!r}" + (f", which GGUF files call {' or '.join(map(repr, names))}" if names else "")
        )
    return found
