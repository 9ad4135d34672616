"""Every architecture on a GPU: in float32 the tokens of `transformers` on a CPU, else as likely ones."""

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.gpu.marks import DTYPES, NEEDS_GPU
from tests.tiny_models import ARCHITECTURES, make
from tests.unit.engine.requests import LENGTHS, NEW, Requests, load_engine, load_reference, prompts
from tests.unit.engine.runners.test_parity import (
    ELSEWHERE,
    PADDED,
    behind_likeliest,
    check,
    overlap,
    run_overlapping,
)
from tgi_server.engine.linear.grouped_experts import GroupedExperts, _fault_of

pytestmark = NEEDS_GPU

CUDA = torch.device("cuda")
# How far, in standard deviations, a token's logit may be below the highest one in half precision. Where the last bit
# chooses another expert, or other tokens of an index, it may be further below: for a few tokens more than twice as many
# as in the layers of `transformers`.
LIKELY, MORE = 0.2, 2


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - ELSEWHERE))
def test_overlapping_requests_get_the_tokens_of_transformers(architecture, tmp_path) -> None:
    requests, expected = overlap(make(architecture, tmp_path), device=CUDA)
    assert requests.engine.info.device_type == "cuda"
    assert requests.engine.info.paged is (architecture not in PADDED)
    check(requests, expected)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - ELSEWHERE - PADDED))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_in_half_precision_tokens_are_as_likely_or_nearly_so(architecture, dtype, tmp_path) -> None:
    folder = make(architecture, tmp_path)
    engine = load_engine(folder, dtype=dtype, device=CUDA, cuda_graphs=())  # which take a second to capture
    requests = Requests(engine, prompts())
    run_overlapping(requests)
    model, rounded = load_reference(folder, dtype).float(), load_reference(folder, dtype).to(CUDA)
    behind, usual = [], []
    for text, output in zip(prompts(), requests.outputs, strict=True):
        logits = model(torch.tensor([text + output])).logits[0, len(text) - 1 : -1]
        own = rounded(torch.tensor([text + output], device=CUDA)).logits[0, len(text) - 1 : -1].argmax(1).cpu()
        behind.append(behind_likeliest(logits, torch.tensor(output)))
        usual.append(behind_likeliest(logits, own))
    less_likely, usually = (torch.cat(each).sort(descending=True).values for each in (behind, usual))
    assert len(less_likely) > len(LENGTHS) * NEW / 2
    count, usual_count = (int((each > LIKELY).sum()) for each in (less_likely, usually))
    assert count <= 2 * usual_count + MORE, (less_likely[:8], usually[:8])


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
