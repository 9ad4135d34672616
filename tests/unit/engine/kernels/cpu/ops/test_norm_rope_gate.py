"""Norms, gated SiLU and argmax in C++ against those of torch."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, silu

from tgi_server.engine.kernels import load_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    torch.manual_seed(0)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 40, 43, 960])
def test_norms_and_gates_are_those_of_transformers(dtype, size) -> None:
    x, weight, bias = torch.randn(7, size, dtype=dtype), *torch.randn(2, size, dtype=dtype)
    wanted = layer_norm(x + 3, (size,), weight, bias, 1e-6)
    torch.testing.assert_close(torch.ops.oatmill.layer_norm(x + 3, weight, bias, 1e-6), wanted, **tolerance(dtype))
    wide = x.float()
    wanted = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
    torch.testing.assert_close(torch.ops.oatmill.rms_norm(x, weight, 1e-6), wanted, **tolerance(dtype))
    once = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())).to(dtype)
    torch.testing.assert_close(torch.ops.oatmill.rms_norm(x, 1 + weight.float(), 1e-6), once, **tolerance(dtype))
    gate, up = 10 * torch.randn(2, 7, size, dtype=dtype)
    gated = torch.ops.oatmill.gate_mul(torch.cat([gate, up], -1))
    torch.testing.assert_close(gated, silu(gate) * up, **tolerance(dtype))
    gated = torch.ops.oatmill.gate_mul(torch.cat([gate, up], -1), True)
    torch.testing.assert_close(gated, gelu(gate, approximate="tanh") * up, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 128])
def test_heads_are_normalised_where_they_stand_beside_others(dtype, size) -> None:
    joined, weight = torch.randn(9, 5, size, dtype=dtype), torch.randn(size, dtype=dtype)
    for heads in (joined[:, :3], joined[:, 3:4], joined[:1, :3]):
        found = torch.ops.oatmill.rms_norm(heads, weight, 1e-6)
        assert torch.equal(found, torch.ops.oatmill.rms_norm(heads.clone(), weight, 1e-6))
        assert torch.equal(found.flatten(0, 1), torch.ops.oatmill.rms_norm(heads.flatten(0, 1), weight, 1e-6))


def test_gates_far_from_zero_neither_overflows_nor_turns_to_nan() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, 0.0, 88.5, 200.0, 1e30] + [0.0] * 9)
    gated = torch.ops.oatmill.gate_mul(torch.cat([gate, torch.ones(16)]).unsqueeze(0))
    torch.testing.assert_close(gated[0], silu(gate), rtol=1e-5, atol=1e-5)
    gated = torch.ops.oatmill.gate_mul(torch.cat([gate, torch.ones(16)]).unsqueeze(0), True)
    torch.testing.assert_close(gated[0], gelu(gate, approximate="tanh"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 1000])
def test_argmax_is_the_first_of_the_largest(dtype, size) -> None:
    scores = torch.randint(-5, 5, (30, size)).to(dtype)
    scores[0] = -torch.inf
    largest = scores.max(-1, keepdim=True).values
    first = (scores == largest).int().argmax(-1)
    assert torch.ops.oatmill.argmax(scores).tolist() == first.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 64, 1000, 3000])
def test_argmax_among_what_masks_allow(dtype, size) -> None:
    scores = torch.randint(-50, 50, (5, size)).to(dtype)
    words = -(-size // 32) - 1
    allowed = torch.rand(3, 32 * words) < 0.1
    allowed[:2, 3], allowed[2] = True, False
    bits = (allowed.view(3, words, 32).long() << torch.arange(32)).sum(-1)
    masks = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    chosen = torch.ops.oatmill.argmax(scores, masks, [4, 1, 2])
    wanted = scores.float()
    for mask, row in zip(allowed, (4, 1, 2), strict=True):
        wanted[row, : len(mask)][~mask] = -torch.inf
        wanted[row, len(mask) :] = -torch.inf
    assert chosen.tolist() == wanted.argmax(1).tolist()
