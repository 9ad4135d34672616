"""A tokenizer of another folder is used in place of the model's own."""

from pathlib import Path

import pytest

from tests.gguf_models import make_gguf
from tests.tiny_models import make_llama
from tgi_server.model_files.download import find_model
from tgi_server.model_files.errors import ModelUnavailable


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "tokenizer.json").write_text('{"other": true}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (folder / "model.safetensors").write_bytes(b"of another model")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_llama(tmp_path / "llama")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "own"}')
    return folder


def check_tokenizer(folder: Path) -> None:
    assert (folder / "tokenizer.json").read_text() == '{"other": true}'
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert not (folder / "tokenizer_config.json").exists()


def test_beside_the_weights_of_a_folder(model: Path, tokenizer: Path) -> None:
    folder = find_model(str(model), None, tokenizer_name=str(tokenizer))
    check_tokenizer(folder)
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).resolve() == model / name
    assert find_model(str(model), None, tokenizer_name=str(tokenizer)) == folder
    assert find_model(str(model), None) == model


def test_in_place_of_that_of_a_gguf_file_and_of_the_one_beside_it(model: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Nothing is read of the file's own, which may be of a kind that is not read."""
    file, _ = make_gguf(model, tmp_path / "files", tokenizer__ggml__model="unknown")
    with pytest.raises(ModelUnavailable, match=r"a tokenizer of the kind 'unknown', .* with --tokenizer-name"):
        find_model(str(file), None)
    (file.parent / "tokenizer.json").write_text('{"beside": true}')
    folder = find_model(str(file), None, tokenizer_name=str(tokenizer))
    check_tokenizer(folder)
    assert (folder / file.name).resolve() == file


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}/absent", "--tokenizer-name: there is no folder .*/absent"),
        ("{}", r"--tokenizer-name: .* has none of tokenizer\.json, tokenizer\.model, "),
        ("no such id", "--tokenizer-name: no such id is neither a local folder nor an id of the hub"),
    ],
)
def test_what_is_no_tokenizer_is_named(name: str, message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=message):
        find_model(str(model), None, tokenizer_name=name.format(tmp_path))


def test_a_cache_that_cannot_be_written_is_named(model: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(ModelUnavailable, match=r"no folder of .* with the tokenizer of .* can be written: "):
        find_model(str(model), None, tokenizer_name=str(tokenizer))
