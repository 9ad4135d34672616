"""Every architecture on a GPU: in float32 the tokens of `transformers` on a CPU, else as likely ones."""

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.gpu.marks import DTYPES, NEEDS_GPU
from tests.tiny_models import ARCHITECTURES, make
from tests.unit.engine.requests import LENGTHS, NEW, load_reference, prompts
from tests.unit.engine.runners.test_parity import ELSEWHERE, PADDED, check, lost, overlap
from tgi_server.engine.checkpoint.quantized import Experts
from tgi_server.engine.linear.grouped_experts import GroupedExperts, _fault_of

pytestmark = NEEDS_GPU

CUDA = torch.device("cuda")
# How far, in standard deviations, a token's logit may be below the highest one in half precision; and how many tokens
# of a mixture may be further below, where the last bit may choose another expert.
LIKELY, FLIPPED = 0.2, 2


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - ELSEWHERE))
def test_overlapping_requests_get_the_tokens_of_transformers(architecture, tmp_path) -> None:
    requests, expected = overlap(make(architecture, tmp_path), device=CUDA)
    assert requests.engine.info.device_type == "cuda"
    assert requests.engine.info.paged is (architecture not in PADDED)
    check(requests, expected)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - ELSEWHERE - PADDED))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_tokens_are_as_likely_or_nearly_so(architecture, dtype, tmp_path) -> None:
    folder = make(architecture, tmp_path)
    requests, _ = overlap(folder, dtype=dtype, device=CUDA, cuda_graphs=())  # which take a second to capture
    model = load_reference(folder, dtype).float()
    behind = torch.cat([lost(model, text, output) for text, output in zip(prompts(), requests.outputs, strict=True)])
    assert len(behind) > len(LENGTHS) * NEW / 2
    mixture = any(Experts.fits(module) for module in model.modules())
    most = behind.sort(descending=True).values
    assert most[FLIPPED if mixture else 0] < LIKELY, most[:8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "hidden", "widened"), [(8, 4096, 1792), (128, 2048, 768)])
def test_experts_of_the_usual_size(experts, hidden, widened, dtype) -> None:
    """Also where torch has a grouped product of its own."""
    config = MixtralConfig(num_local_experts=experts, hidden_size=hidden, intermediate_size=widened)
    with CUDA:
        module = MixtralExperts(config).to(dtype)
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=0.02)
    module.requires_grad_(False)
    config._experts_implementation = "grouped_mm"
    assert _fault_of(module, GroupedExperts, dtype) is None


@pytest.mark.parametrize("architecture", ["gemma2", "llama", "opt", "starcoder"])
def test_models_without_the_engines_kernels_give_the_same_tokens(architecture, tmp_path) -> None:
    check(*overlap(make(architecture, tmp_path), device=CUDA, custom_kernels=False))
