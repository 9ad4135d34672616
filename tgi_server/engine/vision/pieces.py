"""Cuts the work of a vision tower into pieces of limited duration, so that others can compute in between."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, activations
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tgi_server.engine.backends.attention.dense import DenseAttention
from tgi_server.engine.linear import PackedLinear

# The name of attention in pieces, among those of `transformers`.
_IMPLEMENTATION = "oatmill_pieces"
# Multiplications a second, until pieces have been measured: those of a slow core.
_FIRST_RATE = 5e9
# Minimum number of rows in a piece: with fewer, weights, keys and values would be read too often.
_LEAST_ROWS = 64


class Pieces:
    """Cuts the work of a thread into pieces of limited duration, by the measured speed of earlier pieces, so that
    others can compute in between. A thread outside of `cut` computes everything at once.
    """

    def __init__(self) -> None:
        self._rates: defaultdict[str, float] = defaultdict(lambda: _FIRST_RATE)
        self._thread = threading.local()

    @contextmanager
    def cut(self, between: Callable[[], None] | None, seconds: Callable[[], float]) -> Iterator[None]:
        """Cuts what this thread computes in the context.

        between: called before each piece; None: nothing is cut. seconds: returns how long the next piece may take.
        """
        self._thread.between, self._thread.seconds, self._thread.ends_at = between, seconds, 0.0
        try:
            yield
        finally:
            self._thread.between = None

    def pause(self, *_: Any) -> None:
        """Lets others compute, if the piece has taken its time."""
        if getattr(self._thread, "between", None) is not None and time.perf_counter() >= self._thread.ends_at:
            self._begin()

    def compute(
        self, kind: str, work: Callable[[int, int], Tensor], items: int, products: int, least: int = 1
    ) -> list[Tensor]:
        """Returns the results of work(first, end) for all items, in one or several pieces.

        kind: the kind of work; each has a speed of its own. products: multiplications per item. least: minimum number
        of items in a piece.
        """
        if getattr(self._thread, "between", None) is None:
            return [work(0, items)]
        results, first = [], 0
        while first < items:
            if self._fitting(kind, products) < min(least, items - first):
                self._begin()
            started = time.perf_counter()
            end = min(items, first + max(least, self._fitting(kind, products)))
            results.append(work(first, end))
            measured = (end - first) * products / max(time.perf_counter() - started, 1e-6)
            self._rates[kind] += 0.2 * (measured - self._rates[kind])
            first = end
        return results

    def _begin(self) -> None:
        """Lets others compute, and begins a piece."""
        self._thread.between()
        self._thread.ends_at = time.perf_counter() + self._thread.seconds()

    def _fitting(self, kind: str, products: int) -> int:
        """Returns how many items of a kind of work fit into the rest of the piece."""
        return int((self._thread.ends_at - time.perf_counter()) * self._rates[kind] / products)


class RowsInPieces(nn.Module):
    """A layer that computes each row alone, some rows at a time. It has the layer's attributes, too."""

    def __init__(self, layer: nn.Module, pieces: Pieces, kind: str, products: int) -> None:
        """products: multiplications of a row; 0: one for each of its numbers."""
        super().__init__()
        self.layer = layer
        self._pieces = pieces
        self._kind = kind
        self._products = products

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        products = self._products or x.shape[-1]
        results = self._pieces.compute(
            self._kind, lambda first, end: self.layer(rows[first:end]), len(rows), products, _LEAST_ROWS
        )
        return (results[0] if len(results) == 1 else torch.cat(results)).view(*x.shape[:-1], -1)


def in_pieces(model: PreTrainedModel) -> Pieces:
    """Makes the layers of a model that compute each row alone, and its attention, compute in pieces, and pauses before
    each of its layers.
    """
    pieces = Pieces()
    model.set_attn_implementation(_IMPLEMENTATION)
    made: dict[nn.Module, nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        module.pieces = pieces
        if isinstance(module, nn.Linear | PackedLinear):
            products = module.in_features * module.out_features
            made.setdefault(module, RowsInPieces(module, pieces, "linear", products))
        elif type(module) is nn.LayerNorm or type(module).__name__.endswith("RMSNorm") or _is_activation(module):
            made.setdefault(module, RowsInPieces(module, pieces, type(module).__name__, 0))
        if module in made:
            model.set_submodule(path, made[module])
        for layer in module if isinstance(module, nn.ModuleList) else ():
            layer.register_forward_pre_hook(pieces.pause)
    return pieces


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ == activations.__name__ or isinstance(module, nn.GELU | nn.SiLU | nn.ReLU)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Computes attention as `transformers` does, some rows or heads at a time.

    query: [images, heads, tokens, head_dim]. Returns [images, tokens, heads, head_dim].
    """
    images, heads, tokens, size = query.shape
    products = 2 * key.shape[2] * size
    if attention_mask is None and not _is_causal(module, options) and DenseAttention.supports(query, key, value):
        attention = DenseAttention(key, value, options.get("scaling") or size**-0.5)
        rows = query.transpose(1, 2).flatten(0, 1)
        attend_rows = partial(attention.attend, rows)
        results = module.pieces.compute("attention", attend_rows, len(rows), heads * products, _LEAST_ROWS)
        return (results[0] if len(results) == 1 else torch.cat(results)).view(images, tokens, heads, size), None

    def attend(first: int, end: int) -> Tensor:
        part = (tensor[:, first:end] for tensor in (query, key, value))
        result: Tensor = sdpa_attention_forward(module, *part, attention_mask, **options)[0]
        return result

    if key.shape[1] != heads:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    results = module.pieces.compute("attention of heads", attend, heads, images * tokens * products)
    return results[0] if len(results) == 1 else torch.cat(results, 2), None


def _is_causal(module: Any, options: Mapping[str, Any]) -> bool:
    """Returns True if `transformers` lets tokens attend only to earlier ones."""
    said = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if said is None else said)


AttentionInterface.register(_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(_IMPLEMENTATION, sdpa_mask)
