"""The backend of a device, and the model that it makes of a spec or of none."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_models import build
from tgi_server.engine import EngineConfig
from tgi_server.engine.backends import PagedModel, create_backend
from tgi_server.engine.backends.attention.cpu import CpuAttention
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.cpu_model import CpuModel
from tgi_server.engine.backends.generic import GenericModel
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.models.families import family_of, spec_of
from tgi_server.engine.models.spec import DecoderSpec, NoSpec


@torch.inference_mode()
def made(model: PreTrainedModel, spec: DecoderSpec | None = None, *, custom_kernels: bool = True) -> PagedModel | None:
    """spec: None: that of the model's family, if it has one."""
    if spec is None:
        try:
            spec = spec_of(model.config)
        except NoSpec:
            spec = None
    config = EngineConfig(Path("/nowhere"), custom_kernels=custom_kernels)
    return create_backend(model, config).create_model(family_of(model.config), spec)


def test_a_spec_is_run_outside_the_modules_of_transformers() -> None:
    model = build("llama")
    layers = list(model.model.layers)
    assert isinstance(made(model), CpuModel)
    assert not any(layer in model.model.layers for layer in layers), "the weights are there once"


@pytest.mark.parametrize(
    ("architecture", "custom_kernels", "attention"),
    [("opt_350m", True, CpuAttention), ("gpt2", False, GatherAttention), ("llama", False, GatherAttention)],
)
def test_without_a_spec_or_kernels_transformers_computes(architecture, custom_kernels, attention) -> None:
    paged = made(build(architecture), custom_kernels=custom_kernels)
    assert isinstance(paged, GenericModel)
    assert type(paged.attention) is attention


@pytest.mark.parametrize("architecture", ["deepseek_v32", "glm_moe_dsa"])
def test_a_spec_that_the_kernels_cannot_compute_runs_in_plain_torch(architecture: str) -> None:
    paged = made(build(architecture))
    assert isinstance(paged, ReferenceModel)
    assert type(paged.attention) is GatherAttention


def test_the_log_says_that_a_model_runs_by_its_spec_without_kernels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(made(build("bloom"), custom_kernels=False), ReferenceModel)
    assert "bloom runs by its spec in plain torch: it called the attention function 0 times" in caplog.text
    assert "padded" not in caplog.text


def test_models_that_cannot_be_paged_are_left_as_they_are() -> None:
    model = build("mamba")
    names = [name for name, _ in model.named_modules()]
    assert made(model) is None
    assert [name for name, _ in model.named_modules()] == names


def test_a_model_that_its_spec_does_not_describe_keeps_its_layers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = build("llama")
    spec = spec_of(model.config)
    other = replace(spec, layers=tuple(replace(layer, down="mlp.out_proj") for layer in spec.layers))
    assert isinstance(made(model, other), GenericModel)
    assert "llama runs in the layers of transformers: layer 0: " in caplog.text


def test_a_spec_that_computes_something_else_ends_the_start() -> None:
    model = build("llama")
    with pytest.raises(UnsupportedModel, match=r"is off by .* start with --disable-custom-kernels"):
        made(model, replace(spec_of(model.config), residual_scale=0.5))
