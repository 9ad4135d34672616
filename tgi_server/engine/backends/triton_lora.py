"""LoRA deltas on a GPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tgi_server.engine import proofs
from tgi_server.engine.backends.lora import AdapterRows, LoraBackend, LoraDelta, TorchLora
from tgi_server.engine.kernels.triton import device_fault
from tgi_server.engine.kernels.triton.lora import FEW_ROWS, add_products

# Numbers of adapters for which the tables have room.
_NUMBERS = 1024


class TritonLora(LoraBackend):
    """LoRA deltas by two Triton kernels. Tables have the address of each adapter's matrices by its number; 0: none."""

    def __init__(self, outputs: int, most_ranks: int, device: torch.device) -> None:
        """most_ranks: the highest rank of an adapter in this layer."""
        self._outputs = outputs
        self._most_ranks = most_ranks
        self._deltas: dict[int, tuple[Tensor | None, ...]] = {}
        # addresses of a, b, dora_scale and bias_delta; and the number of rows of a
        self._tables = torch.zeros(4, _NUMBERS, dtype=torch.int64, device=device)
        self._ranks = torch.zeros(_NUMBERS, dtype=torch.int32, device=device)

    def put(self, adapter: int, change: LoraDelta) -> None:
        b = change.a.new_zeros(len(change.a), self._outputs)
        rank = 0
        for first, part in zip(change.firsts, change.b, strict=True):
            b[rank : rank + len(part), first : first + part.shape[1]] = part
            rank += len(part)
        tensors = (change.a, b, change.dora_scale, change.bias_delta)
        self._deltas[adapter] = tensors
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._tables[:, adapter] = torch.tensor(addresses, device=self._tables.device)
        self._ranks[adapter] = len(change.a)

    def drop(self, adapter: int) -> None:
        if self._deltas.pop(adapter, None) is not None:
            self._tables[:, adapter] = 0
            self._ranks[adapter] = 0

    def warm_up(self, inputs: int, dtype: torch.dtype) -> None:
        for count in (1, FEW_ROWS + 1):
            numbers = torch.zeros(count, dtype=torch.int32, device=self._ranks.device)
            x, y = (numbers.new_zeros(count, size, dtype=dtype) for size in (inputs, self._outputs))
            for residual in (None, y):
                self.apply(x, y, AdapterRows(numbers, None), residual=residual)

    def apply(self, x: Tensor, y: Tensor, rows: AdapterRows, *, residual: Tensor | None) -> Tensor:
        count = x.numel() // x.shape[-1]
        return add_products(
            x, y, rows.of(count), rows.order(count), self._tables, self._ranks, self._most_ranks,
            residual=residual,
        )  # fmt: skip


def fault_of(dtype: torch.dtype, device: torch.device) -> str | None:
    """Tests the kernels on a small input. Returns the reason not to use them; None if they are right."""
    if fault := device_fault(device):
        return fault
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device)

    plain, products = TorchLora(), TritonLora(96, 24, device)
    change = LoraDelta(random(24, 80).to(dtype), [random(24, 48).to(dtype)], [32], random(96), random(96))
    rows = AdapterRows(torch.tensor([0, 2, 1, 2, 0], dtype=torch.int32, device=device), frozenset({2}))
    x, y = random(5, 80).to(dtype), random(5, 96).to(dtype)

    def cases() -> Iterator[proofs.Case]:
        plain.put(2, change)
        products.put(2, change)
        wanted, actual = (each.apply(x, y.clone(), rows, residual=y) for each in (plain, products))
        yield "", actual, wanted

    return proofs.fault_of("the kernel of adapters", cases, "LoRA")
