"""Attention of tokens to all tokens of their sequence on a CPU, by the kernel of paged attention."""

import torch
from torch import Tensor

from tgi_server.engine.backends.attention.cpu import LANES, MAX_HEAD_DIM, CpuAttention
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.memory import HOST

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DenseAttention:
    """The keys and values of some sequences of one length, in blocks of their own."""

    def __init__(self, key: Tensor, value: Tensor, scaling: float) -> None:
        """key, value: [sequences, kv_heads, tokens, head_dim]."""
        sequences, heads, self._tokens, size = key.shape
        block_size = CpuAttention.block_size
        blocks = -(-self._tokens // block_size)
        self._scaling = scaling
        self._keys = key.new_zeros(sequences * blocks, heads, size * block_size)
        self._values = torch.zeros_like(self._keys)
        self._tables = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
        slots = torch.arange(sequences)[:, None] * (blocks * block_size) + torch.arange(self._tokens)
        rows = (each.transpose(1, 2).flatten(0, 1) for each in (key, value))
        torch.ops.oatmill.write_kv(*rows, self._keys, self._values, slots.flatten())

    @staticmethod
    def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Returns True if the kernel computes tensors of these shapes."""
        size = query.shape[-1]
        fits = size % LANES == 0 and size <= MAX_HEAD_DIM and key.shape == value.shape and size == key.shape[-1]
        grouped = query.shape[1] % key.shape[1] == 0
        return fits and grouped and query.device == HOST and query.dtype in _DTYPES and load_kernels()

    def attend(self, query: Tensor, first: int, end: int) -> Tensor:
        """Returns the result for the rows `first` to `end` - 1, [rows, heads, head_dim].

        query: [sequences * tokens, heads, head_dim].
        """
        own = range(first // self._tokens, (end - 1) // self._tokens + 1)
        starts = [max(each * self._tokens, first) - first for each in own]
        attended: Tensor = torch.ops.oatmill.paged_attention(
            query[first:end],
            self._keys,
            self._values,
            self._tables[own.start : own.stop],
            torch.full((len(own),), self._tokens, dtype=torch.int32),
            torch.tensor([*starts, end - first], dtype=torch.int32),
            self._scaling,
            0,  # no window
            0.0,  # no cap
            None,
            False,
            None,
            ends=torch.full((end - first,), self._tokens, dtype=torch.int32),
        )
        return attended
