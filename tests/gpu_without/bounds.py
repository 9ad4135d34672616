"""A plugin of pytest: in Triton's interpreter, no kernel may load or store outside the tensors that it was given.

On a GPU a wrong address often goes unnoticed: what lies there is some other tensor of the process.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Bounds:
    """The memory of the tensors that the kernel which runs was given, as ranges that do not overlap."""

    def __init__(self) -> None:
        self.kernel = ""
        self._starts = self._ends = np.empty(0, np.uint64)

    def enter(self, kernel: str, tensors: list[Tensor]) -> None:
        self.kernel = kernel
        ranges: list[list[int]] = []
        for start, end in sorted(map(_range, tensors)):
            if ranges and start <= ranges[-1][1]:
                ranges[-1][1] = max(end, ranges[-1][1])
            else:
                ranges.append([start, end])
        self._starts, self._ends = np.array(ranges, np.uint64).reshape(-1, 2).T

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """Raises AssertionError for an address, where the mask allows it, outside of all ranges."""
        addresses = np.asarray(pointers.data, np.uint64)[np.asarray(mask.data, bool)]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        places = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        inside = (places >= 0) & (addresses + np.uint64(size) <= self._ends[np.maximum(places, 0)])
        outside = addresses[~inside]
        assert not len(outside), f"{self.kernel} {what}s {len(outside)} addresses outside of its tensors"


def _range(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


@pytest.fixture(autouse=True)
def addresses_are_checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    from tgi_server.engine.backends.triton_lora import TritonLora

    bounds, in_tables = Bounds(), []
    launch, put = GridExecutor.__call__, TritonLora.put
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def launched(executor: GridExecutor, *arguments: Any, **options: Any) -> None:
        tensors = [each for each in tree_leaves((arguments, options)) if isinstance(each, Tensor) and each.numel()]
        bounds.enter(executor.fn.__name__, tensors + in_tables)
        launch(executor, *arguments, **options)

    def loaded(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        bounds.check("load", pointers, mask)
        return load(builder, pointers, mask, *rest)

    def stored(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        bounds.check("store", pointers, mask)
        return store(builder, pointers, value, mask, *rest)

    def noted(products: TritonLora, number: int, *rest: Any) -> None:
        """Kernels find the matrices of adapters by addresses in tables."""
        put(products, number, *rest)
        in_tables.extend(each for each in products._deltas[number] if isinstance(each, torch.Tensor))

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", loaded)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", stored)
    monkeypatch.setattr(TritonLora, "put", noted)
    yield
