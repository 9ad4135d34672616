"""The products of a mixture's experts for GPUs, in the interpreter, against those of `transformers`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu_without.check_kernels import ERROR, products_of_bfloat16  # noqa: F401
from tests.tiny_models import build
from tests.unit.engine.linear.test_quantized import random_weight
from tgi_server.engine.backends.cuda_parts import route
from tgi_server.engine.backends.layer_parts import routed
from tgi_server.engine.checkpoint.quantized import Experts
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS
from tgi_server.engine.kernels.triton import grouped_gemm, routing
from tgi_server.engine.kernels.triton.grouped_gemm import RowGroups, multiply_groups
from tgi_server.engine.linear import grouped_experts
from tgi_server.engine.linear.grouped_experts import GroupedExperts, GroupedQuantizedExperts, group_experts
from tgi_server.engine.models.spec import MixtureSpec

EXPERTS, INPUTS, OUTPUTS = 5, 70, 90


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("tokens", [1, 3, 60, 200])
def test_each_row_is_multiplied_by_the_weight_of_its_expert(tokens: int, dtype: torch.dtype) -> None:
    """Experts without rows among them, and both layouts of the weights."""
    chosen = torch.randint(EXPERTS - 1, (tokens, 2))
    x, rows = torch.randn(tokens, INPUTS).to(dtype), torch.randn(2 * tokens, INPUTS).to(dtype)
    weights = (torch.randn(EXPERTS, OUTPUTS, INPUTS) / 8).to(dtype)
    bias, shares = torch.randn(EXPERTS, OUTPUTS).to(dtype), torch.rand(2 * tokens)
    groups = RowGroups.of(chosen, EXPERTS, dtype.itemsize)

    def products(x: Tensor, bias: Tensor) -> Tensor:
        of_rows = weights[chosen.flatten()].float()
        return (of_rows @ x.float().unsqueeze(2)).squeeze(2) + bias.float()[chosen.flatten()]

    wanted = products(x.repeat_interleave(2, 0), bias)[groups.order]
    for layout in (weights, weights.mT.contiguous().mT):
        actual = multiply_groups(x, layout, bias, groups, of_token=2)
        torch.testing.assert_close(actual.float(), wanted, rtol=ERROR[dtype], atol=2 * ERROR[dtype])
    wanted = products(rows, 0 * bias) * shares[:, None]
    actual = multiply_groups(rows[groups.order], weights, None, groups, shares=shares)
    torch.testing.assert_close(actual.float(), wanted, rtol=ERROR[dtype], atol=2 * ERROR[dtype])


ROUTERS: dict[str, tuple[int, MixtureSpec]] = {
    "softmax": (8, MixtureSpec(chosen=2)),
    "softmax, not normalised": (60, MixtureSpec(chosen=4, normalised=False)),
    "sigmoid, bias, groups": (
        256,
        MixtureSpec(chosen=8, sigmoid=True, bias="bias", groups=8, chosen_groups=4, group_scores=2, factor=2.5),
    ),
    "groups of no power of two": (120, MixtureSpec(chosen=6, groups=6, chosen_groups=3, normalised=False, factor=16.0)),
    "factors": (128, MixtureSpec(chosen=8, factors="factors")),
    "one of few": (3, MixtureSpec(chosen=1, sigmoid=True, normalised=False)),
    "all": (4, MixtureSpec(chosen=4)),
}


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("kind", ROUTERS)
def test_a_token_has_the_experts_that_plain_torch_chooses(kind: str, dtype: torch.dtype) -> None:
    experts, spec = ROUTERS[kind]
    mixture = SimpleNamespace(bias=torch.randn(experts) / 4, factors=torch.rand(experts).bfloat16())
    layer: Any = SimpleNamespace(spec=SimpleNamespace(mixture=spec), mixture=mixture)
    logits = torch.randn(9, experts)
    wanted, wanted_shares = routed(layer, logits)
    chosen, shares = route(layer, logits, dtype)
    assert torch.equal(chosen, wanted)
    assert shares.dtype is dtype
    torch.testing.assert_close(shares.float(), wanted_shares, rtol=ERROR[dtype] / 4, atol=1e-6)


def test_of_equal_experts_the_first_are_chosen_and_none_of_nan_is_out_of_reach() -> None:
    layer: Any = SimpleNamespace(spec=SimpleNamespace(mixture=MixtureSpec(chosen=3)), mixture=None)
    equal, _ = route(layer, torch.zeros(2, 7), torch.float32)
    assert equal.tolist() == [[0, 1, 2]] * 2
    chosen, _ = route(layer, torch.full((2, 7), torch.nan), torch.float32)
    assert chosen.max() < 7


@pytest.mark.parametrize(("experts", "of_token", "tokens"), [(5, 2, 3), (256, 8, 9), (160, 6, 400), (8, 1, 1)])
def test_rows_are_sorted_by_their_experts(experts: int, of_token: int, tokens: int) -> None:
    chosen = torch.randint(experts // 2, (tokens, of_token)) * 2  # others have no rows
    order, starts, tile_ends = routing.grouped_rows(chosen, experts, 16)
    ordered, wanted = chosen.flatten().sort(stable=True)
    assert torch.equal(order, wanted)
    assert torch.equal(starts, torch.searchsorted(ordered, torch.arange(experts + 1), out_int32=True))
    assert torch.equal(tile_ends, ((starts.diff() + 15) // 16).cumsum(0, dtype=torch.int32))


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("given", ["experts", "shared", "gate", "residual", "all"])
def test_what_experts_give_is_summed(given: str, dtype: torch.dtype) -> None:
    outputs, shared, residual = torch.randn(3, 4, 1100), torch.randn(3, 1100), torch.randn(3, 1100)
    outputs, shared, residual, gate = (each.to(dtype) for each in (outputs, shared, residual, torch.randn(3, 1)))
    wanted = outputs.float().sum(1)
    if given in ("shared", "gate", "all"):
        wanted = wanted + shared.float() * (1 if given == "shared" else gate.float().sigmoid())
    if given in ("residual", "all"):
        wanted = wanted + residual.float()
    actual = routing.summed(
        outputs,
        shared if given in ("shared", "gate", "all") else None,
        gate if given in ("gate", "all") else None,
        residual if given in ("residual", "all") else None,
    )
    torch.testing.assert_close(actual.float(), wanted, rtol=ERROR[dtype], atol=ERROR[dtype])


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss", "nemotron_h"])
def test_models_take_the_kernel_where_it_is_right(
    architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_experts, "_waits", lambda _: True)
    model = build(architecture, dtype=dtype)
    tokens = torch.arange(3, 40).unsqueeze(0)
    wanted = model(input_ids=tokens).logits.float()
    assert group_experts(model, dtype) == []
    assert any(isinstance(module, GroupedExperts) for module in model.modules())
    actual = model(input_ids=tokens).logits.float()
    if dtype is torch.float32:  # in less, the last bit may choose other experts
        torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-3)


def quantized(architecture: str, kind: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Returns a model whose experts are quantized, and one with the same weights made dense."""
    model, dense = build(architecture), build(architecture)
    for path, module in list(dense.named_modules()):
        if not Experts.fits(module):
            continue
        parts = 1 if module.is_transposed else 2
        experts = Experts.quantized(model.get_submodule(path), parts)
        model.set_submodule(path, experts)
        for name, layers in (("gate_up_proj", experts.gate_up), ("down_proj", experts.down)):
            weights = getattr(module, name).data
            for weight, own in zip(weights.mT if module.is_transposed else weights, layers, strict=True):
                own = [own] if name == "down_proj" else list(own)
                for rows, layer in zip(weight.chunk(len(own)), own, strict=True):
                    layer.fill(ROUNDINGS[kind][1](rows.contiguous()))
                    rows.copy_(layer.weight)
    return model, dense


@pytest.mark.parametrize("kind", ["int4", "bitsandbytes-nf4", "int8", "fp8"])
@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
@torch.inference_mode()
def test_quantized_experts_stay_so(architecture: str, kind: str) -> None:
    model, dense = quantized(architecture, kind)
    assert group_experts(model, torch.float32) == []
    assert any(isinstance(module, GroupedQuantizedExperts) for module in model.modules())
    assert not any(isinstance(module, Experts) for module in model.modules())
    tokens = torch.arange(3, 40).unsqueeze(0)
    wanted, actual = (each(input_ids=tokens).logits for each in (dense, model))
    torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["own orders", "one order"])
@torch.inference_mode()
def test_inputs_in_any_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert's inputs are grouped in an order of their own, as GPTQ does it; few rows, and so many that weights
    are dequantized for some experts at a time.
    """
    monkeypatch.setattr(grouped_gemm, "_DEQUANTIZED_BYTES", 1)
    model, _ = quantized("mixtral", "int4")
    for module in [module for module in model.modules() if isinstance(module, Experts)]:
        for number, own in enumerate((*module.gate_up, *([down] for down in module.down))):
            seed = torch.Generator().manual_seed(0 if kind == "one order" else number)
            inputs = own[0].in_features
            groups = (torch.arange(inputs) // 32)[torch.randperm(inputs, generator=seed)]
            for layer in own:
                layer.fill(random_weight("int4", inputs, layer.out_features, groups))
    layer = next(module for module in model.modules() if isinstance(module, Experts))
    own = GroupedQuantizedExperts(layer, torch.float32)
    assert own.gate_up.order is not None
    assert own.gate_up.order.dim() == (1 if kind == "one order" else 2)
    for tokens in (3, 300):
        x, chosen = torch.randn(tokens, 64), torch.randint(4, (tokens, 2))
        shares = torch.rand(tokens, 2)
        torch.testing.assert_close(own(x, chosen, shares), layer(x, chosen, shares), rtol=1e-3, atol=1e-3)
    assert group_experts(model, torch.float32) == []
    assert not any(isinstance(module, Experts) for module in model.modules())


def test_a_kernel_that_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_experts, "_waits", lambda _: True)
    monkeypatch.setattr(GroupedExperts, "outputs", lambda experts, hidden, *_: hidden.unsqueeze(1))
    model = build("mixtral")
    (fallback,) = group_experts(model, torch.float32)
    assert "the kernel of experts is off by" in fallback
    assert not any(isinstance(module, GroupedExperts) for module in model.modules())
