"""Norms, activations and argmax in C++ against those of torch."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu, silu

from tgi_server.engine.kernels import load_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "silu": silu,
}


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    torch.manual_seed(0)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 40, 43, 960])
def test_norms_are_those_of_transformers(dtype, size) -> None:
    x, weight, bias = torch.randn(7, size, dtype=dtype), *torch.randn(2, size, dtype=dtype)
    wanted = layer_norm(x + 3, (size,), weight, bias, 1e-6)
    torch.testing.assert_close(torch.ops.oatmill.layer_norm(x + 3, weight, bias, 1e-6), wanted, **tolerance(dtype))
    wide = x.float()
    wanted = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
    torch.testing.assert_close(torch.ops.oatmill.rms_norm(x, weight, 1e-6), wanted, **tolerance(dtype))
    once = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())).to(dtype)
    torch.testing.assert_close(torch.ops.oatmill.rms_norm(x, 1 + weight.float(), 1e-6), once, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 40, 43, 960])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_torch(name, dtype, size) -> None:
    gate, up = 4 * torch.randn(2, 7, size, dtype=dtype)
    wanted = ACTIVATIONS[name](gate)
    torch.testing.assert_close(torch.ops.oatmill.activate(gate, name, False), wanted, **tolerance(dtype))
    gated = torch.ops.oatmill.activate(torch.cat([gate, up], -1), name, True)
    torch.testing.assert_close(gated, wanted * up, **tolerance(dtype))
    row = torch.ops.oatmill.activate(gate[3, size // 2 :], name, False)
    assert torch.equal(row, torch.ops.oatmill.activate(gate, name, False)[3, size // 2 :]), "the same bits anywhere"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 128])
def test_heads_are_normalised_where_they_stand_beside_others(dtype, size) -> None:
    joined, weight = torch.randn(9, 5, size, dtype=dtype), torch.randn(size, dtype=dtype)
    for heads in (joined[:, :3], joined[:, 3:4], joined[:1, :3]):
        found = torch.ops.oatmill.rms_norm(heads, weight, 1e-6)
        assert torch.equal(found, torch.ops.oatmill.rms_norm(heads.clone(), weight, 1e-6))
        assert torch.equal(found.flatten(0, 1), torch.ops.oatmill.rms_norm(heads.flatten(0, 1), weight, 1e-6))


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_activations_far_from_zero_neither_overflow_nor_turn_to_nan(name) -> None:
    x = torch.tensor([-1e30, -200.0, -88.5, -13.0, -5.0, 0.0, 13.0, 88.5, 200.0, 1e30] + [0.0] * 6)
    actual = torch.ops.oatmill.activate(x, name, False)
    torch.testing.assert_close(actual, ACTIVATIONS[name](x), rtol=1e-5, atol=1e-5)


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
