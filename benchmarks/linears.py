"""A model's linear layers and nothing else: what they cost, and how fast they are when nothing is around them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.floor import ModelCost
from benchmarks.timing import timed
from tgi_server.engine.linear import linear_layer

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers with the same input, which engines compute as one."""


@dataclass(frozen=True, slots=True)
class LinearShapes:
    """(out_features, in_features) of every linear layer in the order of computation, and of the output head."""

    layers: list[tuple[int, int]]
    head: tuple[int, int]

    def cost(self, dtype: torch.dtype) -> ModelCost:
        weights = sum(rows * columns for rows, columns in self.layers)
        head = self.head[0] * self.head[1]
        return ModelCost((weights + head) * dtype.itemsize, 2 * weights, 2 * head)


def linear_shapes(path: Path) -> LinearShapes:
    """Of the model in a folder; its weights are not read. Raises ValueError when there is none, or no linear layer."""
    if not (path / "config.json").is_file():
        raise ValueError(f"no model in {path}; `python -m benchmarks.synthetic` writes some")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
    head = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    layers = {name: (module.out_features, module.in_features) for name, module in modules.items() if module is not head}
    if not layers:
        raise ValueError(f"{path} has no layers of the kind nn.Linear")
    return LinearShapes(_join(layers), (head.out_features, head.in_features))


def _join(layers: dict[str, tuple[int, int]]) -> list[tuple[int, int]]:
    joined: dict[str, tuple[int, int]] = {}
    for name, (rows, columns) in layers.items():
        parent, _, own = name.rpartition(".")
        group = next((group for group in _JOINED if own in group), (own,))
        key = f"{parent}.{group[0]}"
        before, _ = joined.get(key, (0, columns))
        joined[key] = (before + rows, columns)
    return list(joined.values())


class BareLinears:
    """Random weights of a model's shapes: each layer has its own, so that they come from memory as the model's do."""

    def __init__(self, shapes: LinearShapes, device: torch.device, dtype: torch.dtype) -> None:
        def layer(shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
            return _linear(torch.empty(shape, device=device, dtype=dtype).normal_(std=0.02))

        self._shapes = shapes
        self._device, self._dtype = device, dtype
        self._layers = [layer(shape) for shape in shapes.layers]
        self._head = layer(shapes.head)

    def times(self, tokens: int, logits_rows: int) -> list[float]:
        """Seconds of each of several passes with `tokens` rows for every layer and `logits_rows` for the head."""
        inputs = self._inputs(tokens, logits_rows)
        return timed(lambda: self._run(inputs), self._device)

    def _inputs(self, tokens: int, logits_rows: int) -> list[Tensor]:
        widths = {columns for _, columns in self._shapes.layers}
        by_width = {width: torch.randn(tokens, width, device=self._device).to(self._dtype) for width in widths}
        head = torch.randn(logits_rows, self._shapes.head[1], device=self._device).to(self._dtype)
        return [*(by_width[columns] for _, columns in self._shapes.layers), head]

    def _run(self, inputs: list[Tensor]) -> None:
        for layer, x in zip([*self._layers, self._head], inputs, strict=True):
            layer(x)


def _linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A layer as the engine computes it on the device where its weight is."""
    if weight.device.type != "cpu":
        return partial(linear, weight=weight)
    return linear_layer(None, weight.dtype, custom_kernels=True)(weight)
