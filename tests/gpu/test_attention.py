"""The CUDA backend against attention computed sequence by sequence in float32, as on a CPU."""

import pytest
import torch

from tests.gpu.marks import DTYPES, NEEDS_GPU
from tests.unit.engine.backends.attention.test_backends import FP8, fp8, run, run_latents
from tgi_server.engine.backends.attention.base import AttentionVariant, KVShape
from tgi_server.engine.backends.attention.cuda import CudaAttention
from tgi_server.engine.backends.attention.cuda_latents import LatentAttention

pytestmark = NEEDS_GPU

ERROR = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
SLOPES = torch.linspace(0.02, 0.6, 8)


VARIANTS = {
    "window": AttentionVariant(0.1, window=5),
    "wide window": AttentionVariant(0.1, window=700),
    "soft cap": AttentionVariant(0.1, softcap=3.0),
    "alibi": AttentionVariant(0.1, alibi_slopes=SLOPES),
    "rounded alibi": AttentionVariant(0.1, alibi_slopes=SLOPES.bfloat16().float(), rounded_alibi=True),
    "sinks": AttentionVariant(0.1, window=700, sinks=torch.linspace(-4, 12, 8)),
}
# Compiling a combination takes seconds, so not all of them are tried.
CASES = [(dtype, head_dim, 2, AttentionVariant(0.1)) for dtype in DTYPES for head_dim in (24, 64, 128, 256)]
CASES += [(torch.bfloat16, 64, kv_heads, AttentionVariant(0.1)) for kv_heads in (1, 8)]
CASES += [(torch.bfloat16, 64, 2, variant) for variant in VARIANTS.values()]


@pytest.mark.parametrize(("dtype", "head_dim", "kv_heads", "variant"), CASES)
def test_whatever_a_layer_asks_for(dtype, head_dim, kv_heads, variant) -> None:
    """Sequences of one token and of thousands, which are attended in parts; prompts new, continued, and together."""
    backend = CudaAttention(KVShape((kv_heads,), head_dim), torch.device("cuda"), dtype)
    assert isinstance(backend, CudaAttention)
    actual, wanted = run(backend, 8, kv_heads, [1, 33, 900, 5000], [(0, 1), (0, 70), (1500, 100)], variant)
    tolerance = ERROR[dtype] * (4 if variant.alibi_slopes is not None else 1)
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cached", FP8)
def test_a_cache_in_8_bits(dtype, cached) -> None:
    backend = CudaAttention(KVShape((2,), 128), torch.device("cuda"), dtype, fp8(cached))
    assert isinstance(backend, CudaAttention)
    actual, wanted = run(backend, 8, 2, [1, 900, 5000], [(0, 70), (1500, 100)], AttentionVariant(0.1))
    torch.testing.assert_close(actual, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_that_decode_alone(dtype) -> None:
    backend = CudaAttention(KVShape((2,), 128), torch.device("cuda"), dtype)
    actual, wanted = run(backend, 8, 2, [1, *[40] * 62, 9000], [], AttentionVariant(0.1))
    torch.testing.assert_close(actual, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_heads_than_a_program_holds(dtype) -> None:
    backend = CudaAttention(KVShape((1,), 64), torch.device("cuda"), dtype)
    actual, wanted = run(backend, 71, 1, [7, 300], [(0, 40)], AttentionVariant(0.1))
    torch.testing.assert_close(actual, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank"), [(16, 512), (128, 512), (20, 512), (40, 256)])
def test_latents(heads, rank, dtype) -> None:
    """One token of each sequence, beside a prompt's chunk; and several, as with drafts."""
    for row_tokens, chunk in ((1, 70), (4, 0)):
        backend = LatentAttention(KVShape((1,), rank, value_dim=64), torch.device("cuda"), dtype)
        actual, wanted = run_latents(backend, heads, [row_tokens, 33, 900, 5000], row_tokens, chunk)
        scale = float(wanted.abs().max())
        torch.testing.assert_close(actual / scale, wanted / scale, rtol=ERROR[dtype], atol=ERROR[dtype])
