"""Models that cannot run in the padded way."""

import pytest

from tests.tiny_models import make
from tests.unit.engine.requests import load_engine
from tgi_server.engine.errors import UnsupportedModel


def test_a_model_that_cannot_go_on_from_what_it_computed_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(UnsupportedModel, match="rwkv models are not supported: "):
        load_engine(make("rwkv", tmp_path))
