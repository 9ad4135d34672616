"""The same seed gives the same text on a GPU as on a CPU."""

import pytest
import torch

from tests.gpu.marks import NEEDS_GPU
from tgi_server import demo_model
from tgi_server.contract import SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.offline import generate

pytestmark = NEEDS_GPU

PROMPTS = [[1, 40, 77, 300], [1, *range(50, 90)], [1, 5]]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(),
        SamplingParameters(do_sample=True, temperature=1.2, seed=7),
        SamplingParameters(do_sample=True, top_p=0.8, top_k=30, seed=8, repetition_penalty=1.2),
        SamplingParameters(do_sample=True, typical_p=0.6, seed=9),
    ],
)
def test_devices_agree(sampling) -> None:
    texts = []
    for name in ("cpu", "cuda"):
        engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32, device=torch.device(name)))
        texts.append(generate(engine, PROMPTS, StoppingParameters(32, ignore_eos=True), sampling, max_batch_size=8))
    assert texts[0] == texts[1]
