"""GGUF files get a folder in transformers format, and the right one of several is taken."""

import json
import os
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.adapters import make_adapter
from tests.gguf_adapters import write_gguf_adapter
from tests.gguf_models import make_gguf
from tests.tiny_models import make_llama
from tgi_server.gguf.paths import TENSORS
from tgi_server.model_files import gguf_models
from tgi_server.model_files.download import find_model
from tgi_server.model_files.errors import ModelUnavailable
from tgi_server.model_files.gguf_models import GgufChoice, described, known_description, split_kind
from tgi_server.model_files.ready_models import ready_model

NAMES = ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return make_gguf(make_llama(tmp_path / "llama"), folder)[0]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (GgufChoice(kind="Q4_K_M"), NAMES[0]),
        (GgufChoice(kind="q8_0"), NAMES[1]),
        (GgufChoice(kind="Q6_K"), NAMES[2]),
        (GgufChoice(name="m-Q8_0.gguf"), NAMES[1]),
    ],
)
def test_a_file_is_chosen_by_its_name_or_kind(choice: GgufChoice, expected: str) -> None:
    assert choice.of(NAMES, "maker/model") == expected


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (GgufChoice(), "maker/model has several GGUF files; choose one with --gguf-file: Q6_K/m-Q6_K-00001-of-00002"),
        (GgufChoice(kind="Q5_0"), "maker/model has no GGUF file Q5_0; choose one with --gguf-file: .*, m-Q8_0.gguf"),
        (GgufChoice(name="a.gguf"), "maker/model has no GGUF file --gguf-file a.gguf; choose"),
    ],
)
def test_what_cannot_be_chosen_is_listed(choice: GgufChoice, message: str) -> None:
    with pytest.raises(ModelUnavailable, match=message):
        choice.of(NAMES, "maker/model")


def test_projectors_of_images_are_not_models() -> None:
    assert GgufChoice().of(["mmproj-m-f16.gguf", "m-Q8_0.gguf"], "here") == "m-Q8_0.gguf"


@pytest.mark.parametrize(
    ("model_id", "expected"),
    [
        ("maker/model", ("maker/model", None)),
        ("maker/model:Q4_K_M", ("maker/model", "Q4_K_M")),
    ],
)
def test_an_id_may_end_in_a_kind(model_id: str, expected: tuple[str, str | None]) -> None:
    assert split_kind(model_id) == expected


def test_the_folder_of_a_file_links_to_it(file: Path, cache: Path) -> None:
    folder = described(file)
    assert folder.parent == cache / "gguf"
    assert (folder / file.name).resolve() == file
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 64
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [2]}
    tensors = json.loads((folder / TENSORS).read_text())
    assert tensors["model.embed_tokens.weight"]["shape"][1] == 64
    assert described(file) == known_description(file) == ready_model(str(file)) == folder
    assert find_model(str(file.parent), None) == folder


def test_a_folder_is_known_at_once_unless_something_has_to_be_looked_up(file: Path, tmp_path: Path) -> None:
    assert ready_model(str(file)) is None
    folder = described(file)
    assert ready_model(str(folder)) is None  # it has no safetensors files
    assert ready_model(str(file), cache=tmp_path / "another") is None
    assert ready_model(str(file), tokenizer_name="maker/model") is None
    assert ready_model("maker/model") is None
    (folder / "model.safetensors").touch()
    assert ready_model(str(folder)) == folder
    assert ready_model(str(folder), gguf_file="other.gguf") is None
    (folder / "config.json").write_text('{"medusa_num_heads": 2}')
    assert ready_model(str(folder)) is None


def test_a_later_version_describes_a_file_anew(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_description(file) is None
    plain = described(file)
    monkeypatch.setattr(gguf_models, "_code", lambda: b"later")
    assert known_description(file) is None
    assert described(file) != plain


def test_a_changed_file_is_not_known(file: Path) -> None:
    described(file)
    os.utime(file, (0, 0))
    assert known_description(file) is None
    file.unlink()
    assert known_description(file) is None


def test_a_folder_s_own_tokenizer_wins(file: Path) -> None:
    plain = described(file)
    (file.parent / "tokenizer.json").write_text('{"own": true}')
    (file.parent / "chat_template.jinja").write_text("{{ messages }}")
    folder = described(file)
    assert folder != plain
    assert (folder / "tokenizer.json").read_text() == '{"own": true}'
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (folder / "tokenizer_config.json").exists()


def test_a_folder_that_cannot_be_written_is_named(file: Path, cache: Path) -> None:
    cache.touch()
    with pytest.raises(ModelUnavailable, match=r"no configuration can be written for .*llama\.gguf: "):
        described(file)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelUnavailable, match=r"model\.gguf is incomplete") as error:
        find_model(str(tmp_path / "model.gguf"), None)
    assert "\n" not in str(error.value)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "llama")
    peft, _ = make_adapter(AutoModelForCausalLM.from_pretrained(model), tmp_path / "peft", target_modules=["q_proj"])
    file = write_gguf_adapter(peft, model, tmp_path / "chef.gguf")
    with pytest.raises(ModelUnavailable, match=r"is an adapter, not a model; serve its base model with --lora-a"):
        find_model(str(file), None)
