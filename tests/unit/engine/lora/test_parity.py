"""Requests with adapters, token for token equal to the models that peft merges, in float32."""

from pathlib import Path

import pytest
import torch

from tests.adapters import make_adapter
from tests.tiny_models import ARCHITECTURES, make
from tests.unit.engine.lora.adapted import make_adapted
from tests.unit.engine.requests import Requests, load_engine, load_reference, prompts
from tests.unit.engine.runners.test_parity import ELSEWHERE, check, quick, run_overlapping
from tgi_server.engine.errors import InvalidAdapter, InvalidCall

# Of what is no linear layer, or computed for some tokens only, nothing is adapted; these have more.
ADAPTABLE = sorted(ARCHITECTURES.keys() - ELSEWHERE)


@pytest.mark.parametrize("architecture", quick(ADAPTABLE, {"llama"}))
def test_sixteen_requests_over_five_adapters_and_the_base_model(architecture: str, tmp_path: Path) -> None:
    model = make_adapted(make(architecture, tmp_path / "model"))
    engine = load_engine(model.folder)
    model.load(engine)
    requests = Requests(engine, prompts(), adapters=model.ids())
    run_overlapping(requests)
    check(requests, model.expected())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "opt", "falcon_40b", "t5"])
def test_adapters_in_plain_torch(architecture: str, tmp_path: Path) -> None:
    model = make_adapted(make(architecture, tmp_path / "model"))
    engine = load_engine(model.folder, custom_kernels=False)
    model.load(engine)
    requests = Requests(engine, prompts(), adapters=model.ids())
    run_overlapping(requests)
    check(requests, model.expected())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "opt", "t5"])
def test_adapters_that_come_and_go_at_every_turn(architecture: str, tmp_path: Path) -> None:
    model = make_adapted(make(architecture, tmp_path / "model"))
    engine = load_engine(model.folder)
    requests = Requests(engine, prompts(), adapters=model.ids())
    for index, adapter in enumerate(model.ids()):
        model.load(engine, adapter)
        requests.join(index)
        requests.step()
        requests.step()
        requests.leave(index)
        engine.adapters.drop(adapter)
    for index, adapter in enumerate(model.ids()):
        model.load(engine, adapter)
        requests.join(index)
        requests.finish()
        engine.adapters.drop(adapter)
    assert requests.outputs == model.expected()


def test_a_request_with_an_adapter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    engine = load_engine(make("llama", tmp_path))
    requests = Requests(engine, prompts(), adapters=["a0"] * 16)
    requests.join(0)
    with pytest.raises(InvalidCall, match="there is no adapter 'a0' here"):
        requests.step()


@pytest.mark.slow
def test_in_16_bits_each_adapter_has_an_answer_of_its_own(tmp_path: Path) -> None:
    model = make_adapted(make("llama", tmp_path / "model"))
    engine = load_engine(model.folder, torch.bfloat16)
    model.load(engine)
    requests = Requests(engine, [prompts()[1]] * 16, adapters=model.ids())
    for index in range(6):
        requests.join(index)
    assert len({tuple(output) for output in requests.finish()[:6]}) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "targets", "path"),
    [
        ("mamba", ["x_proj", "dt_proj"], r"backbone.layers.\d.mixer.dt_proj"),
        ("minicpm3", ["q_a_proj", "kv_b_proj"], r"model.layers.\d.self_attn.kv_b_proj"),
    ],
)
def test_what_the_model_does_not_call_is_refused_by_its_name(
    architecture: str, targets: list[str], path: str, tmp_path: Path
) -> None:
    folder = make(architecture, tmp_path / "model")
    place, _ = make_adapter(load_reference(folder), tmp_path / "adapter", r=2, target_modules=targets)
    with pytest.raises(InvalidAdapter, match=f"changes {path}, which cannot be computed"):
        load_engine(folder).adapters.read(place)
