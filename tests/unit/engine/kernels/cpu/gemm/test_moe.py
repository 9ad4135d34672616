"""Mixtures of experts in C++ against those of `transformers`."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, GptOssConfig, MixtralConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tgi_server.engine.kernels import load_kernels, structure
from tgi_server.engine.linear.float import FloatLinear

HIDDEN, WIDENED, EXPERTS, CHOSEN = 40, 56, 6, 3
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def block_of(architecture: str) -> nn.Module:
    if architecture == "gpt_oss":
        return GptOssMLP(
            GptOssConfig(
                hidden_size=HIDDEN,
                intermediate_size=WIDENED,
                num_local_experts=EXPERTS,
                num_experts_per_tok=CHOSEN,
                swiglu_limit=2.0,
                experts_implementation="eager",
            )
        )
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN, "experts_implementation": "eager"}
    if architecture == "mixtral":
        return MixtralSparseMoeBlock(MixtralConfig(intermediate_size=WIDENED, num_local_experts=EXPERTS, **sizes))
    if architecture in GROUPED:
        return WithoutShared(GROUPED[architecture](sizes))
    normalised = architecture == "qwen3_moe"
    return Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(moe_intermediate_size=WIDENED, num_experts=EXPERTS, norm_topk_prob=normalised, **sizes)
    )


class WithoutShared(nn.Module):
    """A mixture whose experts are in groups of two or three, without its shared expert."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = block.gate, block.experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, shares, chosen = self.gate(x)
        return self.experts(x.flatten(0, 1), chosen, shares).view(x.shape)


def deepseek_v2(sizes: dict[str, Any]) -> nn.Module:
    groups = {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5}
    sizes = sizes | {"num_attention_heads": 4, "moe_intermediate_size": WIDENED, "n_routed_experts": EXPERTS}
    return DeepseekV2Moe(DeepseekV2Config(**sizes, **groups))


def nemotron_h(sizes: dict[str, Any]) -> nn.Module:
    groups = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    made = NemotronHMoE(NemotronHConfig(moe_intermediate_size=WIDENED, n_routed_experts=EXPERTS, **sizes, **groups))
    nn.init.normal_(made.gate.e_score_correction_bias, std=0.3)
    return made


GROUPED = {"deepseek_v2": deepseek_v2, "nemotron_h": nemotron_h}


def kernel_of(block: Any, chosen: int = CHOSEN) -> Any:
    router = router_of(block)
    kernel = FloatLinear(router.weight, getattr(router, "bias", None)).kernel()
    return torch.classes.oatmill.Mixture(kernel, experts_of(block), routing_of(router, chosen))


def routing_of(router: Any, chosen: int = CHOSEN) -> Any:
    bias, groups = getattr(router, "e_score_correction_bias", None), getattr(router, "num_group", 1)
    grouped, with_bias = groups > 1, bias is not None
    normalised = getattr(router, "norm_topk_prob", not grouped)
    return structure(
        "Routing",
        chosen=chosen,
        sigmoid=with_bias,
        bias=bias.float() if with_bias else None,
        groups=groups,
        chosen_groups=getattr(router, "topk_group", 1),
        group_scores=2 if with_bias else 1,
        normalised=normalised,
        factor=getattr(router, "routed_scaling_factor", 1.0),
        wide=grouped,
    )


def router_of(block: Any) -> Any:
    return block.router if isinstance(block, GptOssMLP) else block.gate


def experts_of(block: Any) -> Any:
    experts = block.experts
    other, gated = isinstance(block, GptOssMLP), experts.has_gate
    activation, numbers = "silu" if gated else "relu2", (experts.alpha, experts.limit) if other else (0.0, 0.0)
    kernel = torch.classes.oatmill.Experts(activation, gated, *numbers)
    up_projections = experts.gate_up_proj if gated else experts.up_proj
    for number, (up, down) in enumerate(zip(up_projections, experts.down_proj, strict=True)):
        biases = [bias[number].float() for bias in (experts.gate_up_proj_bias, experts.down_proj_bias)] if other else []
        layers = (up.T.contiguous(), down.T.contiguous()) if other else (up, down)
        kernel.add(*(FloatLinear(layer).kernel() for layer in layers), *(biases or [None, None]))
    return kernel


@pytest.fixture(params=["gpt_oss", "mixtral", "qwen3_moe", "qwen3_moe without shares that add up to 1", *GROUPED])
def block(request: pytest.FixtureRequest) -> Any:
    assert load_kernels()
    torch.manual_seed(0)
    made = block_of(request.param)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made.requires_grad_(False)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_a_mixture_computes_what_that_of_transformers_does(dtype, tokens, block) -> None:
    block.to(dtype)
    x, residual = torch.randn(2, tokens, HIDDEN).to(dtype)
    computed = block(x.unsqueeze(0))
    wanted = residual + (computed[0] if isinstance(computed, tuple) else computed)[0]
    found = kernel_of(block).forward(x, residual)
    assert found.dtype == dtype
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("own_threads", [3, 0])
def test_however_threads_share_the_experts_the_sums_are_the_same(own_threads, block) -> None:
    kernel = kernel_of(block)
    texts = [torch.randn(2, tokens, HIDDEN) for tokens in (0, 1, 5, 70)]
    threads, before = torch.get_num_threads(), torch.ops.oatmill.set_own_threads(own_threads)
    try:
        found = []
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            found.append([kernel.forward(x, residual) for x, residual in texts])
    finally:
        torch.set_num_threads(threads)
        torch.ops.oatmill.set_own_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_a_token_gets_the_same_beside_others(block) -> None:
    kernel = kernel_of(block)
    x, residual = torch.randn(2, 70, HIDDEN)
    together = kernel.forward(x, residual)
    for token in (0, 33, 69):
        alone = kernel.forward(x[token : token + 1], residual[token : token + 1])
        assert torch.equal(alone[0], together[token])


def test_numbers_that_are_none_stay_with_their_token(block) -> None:
    kernel = kernel_of(block)
    x, residual = torch.randn(2, 3, HIDDEN)
    wanted = kernel.forward(x, residual)
    x[1, 5] = torch.nan
    found = kernel.forward(x, residual)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])


def test_choices_that_another_router_made(block) -> None:
    x = torch.randn(9, HIDDEN)
    _, shares, chosen = router_of(block)(x)
    found = experts_of(block).forward(x, chosen, shares)
    torch.testing.assert_close(found, block.experts(x, chosen, shares), rtol=1e-4, atol=1e-4)


def test_experts_that_there_are_not_are_refused(block) -> None:
    experts, router = experts_of(block), router_of(block)
    most = EXPERTS * getattr(router, "topk_group", 1) // getattr(router, "num_group", 1)
    with pytest.raises(RuntimeError, match=f"cannot have 7 of {most} experts"):
        kernel_of(block, chosen=7)
    with pytest.raises(IndexError, match="there is no expert 6 of 6"):
        experts.forward(torch.randn(1, HIDDEN), torch.tensor([[0, 6]]), torch.ones(1, 2))
    linear = FloatLinear(router.weight).kernel()
    none = torch.classes.oatmill.Experts("silu", True, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="a router of 6 for 0 experts"):
        torch.classes.oatmill.Mixture(linear, none, routing_of(router))
    one = structure("Routing", sigmoid=True, groups=4)
    with pytest.raises(RuntimeError, match="6 experts are not in 4 groups"):
        torch.classes.oatmill.Mixture(linear, experts, one)
