"""Reads an adapter from a GGUF file, and converts its settings and tensor names to those of `peft`."""

from pathlib import Path

from torch import Tensor

from tgi_server.engine.checkpoint.quantized.gguf_tensors import gguf_numbers
from tgi_server.engine.errors import InvalidAdapter, InvalidWeights
from tgi_server.engine.lora.base_model import BaseModel
from tgi_server.engine.lora.peft_config import PeftConfig
from tgi_server.gguf.adapters import GgufAdapter, read_gguf_adapter
from tgi_server.gguf.architectures import part_of
from tgi_server.gguf.paths import GgufError


def read_gguf(file: Path, base: BaseModel) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Returns the settings and the tensors of an adapter. Raises InvalidAdapter."""
    try:
        adapter = read_gguf_adapter(file, base.config.model_type)
        tensors: dict[str, Tensor] = {}
        ranks: dict[str, int] = {}
        for name in adapter.matrices:
            path, a, b = _matrices(adapter, name, base)
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
            ranks[path] = len(a)
    except (GgufError, InvalidWeights) as error:
        raise InvalidAdapter(str(error)) from error
    config = PeftConfig(
        rank=max(ranks.values()),
        alpha=adapter.alpha,
        rank_pattern=ranks.get,
        alpha_pattern=lambda path: None if adapter.alpha else ranks[path],
        rank_stabilised=False,
        dora=False,
        biases=False,
    )
    return config, tensors


def _matrices(adapter: GgufAdapter, name: str, base: BaseModel) -> tuple[str, Tensor, Tensor]:
    """Returns the path of a pair's layer, and its matrices A and B with rows and columns as in `transformers`."""
    path = adapter.architecture.name_in_model(name)
    change = adapter.architecture.changes(base.config.to_dict(), part_of(name))
    if path is None or "{}" in path or not path.endswith(".weight") or change.beside is not None:
        raise InvalidAdapter(
            f"{adapter.path}: tensor {name}.lora_a is of no linear layer that can have adapters; merge the adapter "
            "into the model, and serve that"
        )
    a, b = map(gguf_numbers, adapter.matrices[name])
    for order, size in ((change.rows, b.shape[0]), (change.columns, a.shape[1])):
        if order is not None and len(order) != size:
            raise InvalidAdapter(
                f"{adapter.path}: {name} has the matrices {list(a.shape)} and {list(b.shape)}, and its layer in the "
                f"base model has {len(order)} {'outputs' if order is change.rows else 'inputs'}"
            )
    a = a if change.columns is None else a[:, change.columns]
    b = b if change.rows is None else b[change.rows]
    return path.removesuffix(".weight"), a, b
