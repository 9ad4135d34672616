"""The defaults of sampling that a model's folder has."""

from pathlib import Path

import pytest

from tgi_server.router.errors import StartupError
from tgi_server.router.text.generation_config import read_sampling_defaults


def test_only_numbers_that_are_finite_are_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    text = '{"temperature": 0.6, "top_k": 20, "top_p": null, "min_p": Infinity, "eos_token_id": 2}'
    (tmp_path / "generation_config.json").write_text(text)
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("content", ["{", "[]", "null", '"temperature"'])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(StartupError, match=r"generation_config\.json is not [^\n]*$"):
        read_sampling_defaults(tmp_path)
