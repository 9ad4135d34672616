"""The CUDA backend where there is no GPU: torch's own kernel has a stand-in, which reads the same arguments.

Its other kernels run here only where Triton is installed, in its interpreter (TRITON_INTERPRET=1); else their stand-in
is attention in plain torch. On a GPU, tests/gpu runs the real ones.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from tests.unit.engine.attention.test_backends import HEAD_DIM, expected, run
from tgi_server.engine.attention import cuda
from tgi_server.engine.attention.base import AttentionVariant, KVShape
from tgi_server.engine.attention.cuda import CudaAttention
from tgi_server.engine.attention.gather import GatherAttention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
VARIANTS = {
    "plain": AttentionVariant(0.2),
    "window": AttentionVariant(0.2, window=5),
    "wide window": AttentionVariant(0.2, window=90),
    "softcap": AttentionVariant(0.2, softcap=3.0),
    "alibi": AttentionVariant(0.2, alibi_slopes=torch.linspace(0.02, 0.6, 6)),
}


def flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Stands in for `varlen_attn`, as documented: a window of (w, 0) is the token itself and w before it."""
    assert enable_gqa is (query.shape[1] != keys.shape[1])
    assert (query_starts.dtype, key_starts.dtype) == (torch.int32, torch.int32)
    assert longest_query == query_starts.diff().max()
    assert longest_key == key_starts.diff().max()
    assert window_size[1] == 0
    queries, spans = query_starts.tolist(), key_starts.tolist()
    assert (queries[-1], spans[-1]) == (len(query), len(keys))
    variant = AttentionVariant(scale, window=window_size[0] + 1)
    parts = [
        expected(
            query[queries[i] : queries[i + 1]],
            keys[spans[i] : spans[i + 1]],
            values[spans[i] : spans[i + 1]],
            variant,
        )
        for i in range(len(queries) - 1)
    ]
    return torch.cat(parts)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaAttention]:
    monkeypatch.setattr(cuda, "_flash", flash)
    monkeypatch.setattr(cuda, "_SAYS_GROUPED", True)
    monkeypatch.setattr(cuda, "FLASH_DTYPES", (torch.float32,))
    if not INTERPRETED:
        monkeypatch.setattr(CudaAttention, "_decode", GatherAttention._decode)
    return CudaAttention(KVShape((2,), HEAD_DIM), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("together", [1, 60, 1000])
@pytest.mark.parametrize(
    ("decodes", "prompts"),
    [
        ([1, 7, 33, 100], [(0, 1), (0, 50), (40, 37), (96, 3)]),
        ([], [(0, 40), (31, 2)]),
        ([1, 64, 300], []),
    ],
)
def test_keys_are_found_wherever_they_are(backend, kind, together, decodes, prompts, monkeypatch) -> None:
    monkeypatch.setattr(cuda, "HISTORY_TOKENS", together)
    actual, wanted = run(backend, 6, 2, decodes, prompts, VARIANTS[kind])
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
