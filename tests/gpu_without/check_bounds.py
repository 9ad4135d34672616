"""Addresses outside of tensors are found; attention reads neither free slots of the cache nor stale block tables."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.gpu_without.check_kernels import ERROR
from tests.unit.engine.backends.attention import test_backends
from tgi_server.engine.backends.attention.base import AttentionVariant, ForwardMetadata, KVShape
from tgi_server.engine.backends.attention.cuda import CudaAttention

# No block has this number: whoever reads it in a table reads outside of the cache.
STALE = 1 << 20


@triton.jit
def _copy(source, target, count, at_once: tl.constexpr):
    place = tl.arange(0, at_once)
    tl.store(target + place, tl.load(source + place, mask=place < count, other=0.0))


def test_addresses_outside_of_tensors_are_found() -> None:
    source, target = torch.ones(6), torch.zeros(8)
    _copy[1,](source, target, 6, at_once=8)
    assert target.sum() == 6
    with pytest.raises(Exception, match="loads 2 addresses outside of its tensors"):
        _copy[1,](source, target, 8, at_once=8)
    with pytest.raises(Exception, match="stores 2 addresses outside of its tensors"):
        _copy[1,](target, source, 6, at_once=8)


@pytest.mark.parametrize("variant", [AttentionVariant(0.1), AttentionVariant(0.1, window=40)], ids=["full", "window"])
def test_attention_reads_what_sequences_have(variant: AttentionVariant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free slots are NaN, and tables hold stale blocks after the last one of each sequence."""
    allocate = CudaAttention.allocate

    def allocated(backend: CudaAttention, blocks: int) -> None:
        allocate(backend, blocks)
        for cache in (*backend._keys, *backend._values):
            cache.fill_(torch.nan)

    def described(*arguments: Tensor, **fields: Tensor) -> ForwardMetadata:
        if fields:
            blocks = -(-fields["kv_lengths"] // CudaAttention.block_size)
            behind = torch.arange(fields["block_tables"].shape[1]) >= blocks[:, None]
            fields["block_tables"] = fields["block_tables"].masked_fill(behind, STALE)
        return ForwardMetadata(*arguments, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaAttention, "allocate", allocated)
    monkeypatch.setattr(test_backends, "ForwardMetadata", described)
    backend = CudaAttention(KVShape((2,), 24), torch.device("cpu"), torch.float32)
    actual, wanted = test_backends.run(backend, 4, 2, [1, 33, 200], [(0, 1), (0, 45), (70, 50)], variant)
    torch.testing.assert_close(actual, wanted, rtol=ERROR[torch.float32], atol=ERROR[torch.float32])
