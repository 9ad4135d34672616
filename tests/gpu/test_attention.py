"""The CUDA backend against attention computed sequence by sequence in float32, as on a CPU."""

import pytest
import torch

from tests.gpu.marks import DTYPES, NEEDS_GPU
from tests.unit.engine.attention.test_backends import run
from tgi_server.engine.attention import create_attention_backend
from tgi_server.engine.attention.base import AttentionVariant, KVShape
from tgi_server.engine.attention.cuda import CudaAttention

pytestmark = NEEDS_GPU

ERROR = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
SLOPES = torch.linspace(0.02, 0.6, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(
    "variant",
    [
        AttentionVariant(0.1),
        AttentionVariant(0.1, window=5),
        AttentionVariant(0.1, window=700),
        AttentionVariant(0.1, softcap=3.0),
        AttentionVariant(0.1, alibi_slopes=SLOPES),
        AttentionVariant(0.1, alibi_slopes=SLOPES.bfloat16().float(), rounded_alibi=True),
    ],
    ids=["plain", "window", "wide window", "softcap", "alibi", "rounded alibi"],
)
def test_whatever_a_layer_asks_for(dtype, head_dim, kv_heads, variant) -> None:
    """Sequences of one token and of thousands, which are attended in parts; prompts new, continued, and together."""
    backend = create_attention_backend(KVShape((kv_heads,), head_dim), torch.device("cuda"), dtype)
    assert isinstance(backend, CudaAttention)
    actual, wanted = run(backend, 8, kv_heads, [1, 33, 900, 5000], [(0, 1), (0, 70), (1500, 100)], variant)
    tolerance = ERROR[dtype] * (4 if variant.alibi_slopes is not None else 1)
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_heads_than_a_program_holds(dtype) -> None:
    backend = create_attention_backend(KVShape((1,), 64), torch.device("cuda"), dtype)
    actual, wanted = run(backend, 71, 1, [7, 300], [(0, 40)], AttentionVariant(0.1))
    torch.testing.assert_close(actual, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])
