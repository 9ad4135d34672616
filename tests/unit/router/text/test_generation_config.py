"""The defaults of sampling that a model's folder has."""

import json
from pathlib import Path

import pytest

from tgi_server.router.errors import StartupError
from tgi_server.router.text.generation_config import read_sampling_defaults


def test_only_numbers_that_are_finite_are_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    text = '{"temperature": 0.6, "top_k": 20, "top_p": null, "min_p": Infinity, "eos_token_id": 2}'
    (tmp_path / "generation_config.json").write_text(text)
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("top_k", 20.0, 20),
        ("top_k", 0, 0),
        ("top_k", -1, -1),
        ("top_k", 20.5, None),
        ("top_k", -5, None),
        ("top_k", 2**40, None),
        ("top_k", True, None),
        ("temperature", 0, 0),
        ("temperature", 1, 1),
        ("temperature", -0.5, None),
        ("temperature", "0.6", None),
        ("temperature", 1e-60, 1e-60),
        ("temperature", 10**400, None),
        ("top_p", 1.0, 1.0),
        ("top_p", 1.5, None),
        ("top_p", [0.9], None),
        ("min_p", 0.0, 0.0),
        ("min_p", 1, None),
        ("repetition_penalty", 0.0, None),
        ("repetition_penalty", 1e39, None),
    ],
)
def test_values_that_no_request_may_have_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: object, taken: float | None
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value, "top_n": 1}))
    expected = {} if taken is None else {name: taken}
    defaults = read_sampling_defaults(tmp_path)
    assert defaults == expected
    assert all(type(each) is int for each in defaults.values() if name == "top_k")
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [f"`{name}`" in line and "generation_config.json" in line for line in warnings] == [True] * (taken is None)


@pytest.mark.parametrize("content", ["{", "[]", "null", '"temperature"'])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(StartupError, match=r"generation_config\.json is not [^\n]*$"):
        read_sampling_defaults(tmp_path)
