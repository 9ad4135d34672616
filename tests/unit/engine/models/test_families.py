"""What the files of families say, without a model."""

import pytest

from tests.tiny_models import ARCHITECTURES, configuration
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.models.families import family_of, plan_for, spec_of
from tgi_server.engine.models.spec import NoSpec

# Tiny models of which a family has a spec that does not describe them, and words of the reason.
REFUSED = {"opt_350m": "norms"}


DESCRIBED = [name for name in ARCHITECTURES if family_of(configuration(name)).spec is not None]


@pytest.mark.parametrize("architecture", sorted(set(DESCRIBED) - set(REFUSED)))
def test_a_family_describes_its_models(architecture: str) -> None:
    config = configuration(architecture)
    spec = spec_of(config)
    assert len(spec.layers) == config.num_hidden_layers
    assert all(layer.rope is None or layer.rope < len(spec.ropes) for layer in spec.layers)


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_family_says_what_it_does_not_describe(architecture: str) -> None:
    with pytest.raises(NoSpec, match=REFUSED[architecture]):
        spec_of(configuration(architecture))


def test_an_activation_without_a_kernel_is_a_reason() -> None:
    with pytest.raises(NoSpec, match="tanhexp"):
        spec_of(configuration("llama", hidden_act="tanhexp"))


def test_a_model_that_cannot_be_split_is_refused_with_those_that_can() -> None:
    with pytest.raises(UnsupportedModel, match=r"mamba models cannot be split.*, llama, "):
        plan_for(configuration("mamba"))
