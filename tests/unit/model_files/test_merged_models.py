"""Models whose folder is that of an adapter."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from tests.adapters import make_adapter
from tests.tiny_models import make
from tgi_server.model_files.download import download_model, find_model
from tgi_server.model_files.errors import ModelUnavailable


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    base = make("llama", tmp_path / "base")
    (base / "tokenizer.json").write_text("{}")
    model = AutoModelForCausalLM.from_pretrained(base)
    return make_adapter(model, tmp_path / "chef", r=2, target_modules=["q_proj"])[0]


def download(model: Path, *, merge_lora: bool = True) -> Path:
    return download_model(
        str(model),
        None,
        extension=".safetensors",
        auto_convert=True,
        trust_remote_code=False,
        merge_lora=merge_lora,
    )


def test_the_folder_of_an_adapter_is_served_as_its_base_model_with_the_adapter_merged(adapter: Path) -> None:
    assert download(adapter, merge_lora=False) == adapter
    with pytest.raises(ModelUnavailable, match=r"chef is an adapter that is not merged into .*base yet"):
        find_model(str(adapter), None)
    merged = download(adapter)
    assert merged.is_relative_to(constants.HF_HUB_CACHE)
    assert find_model(str(adapter), None) == merged == download(adapter)
    assert (merged / "tokenizer.json").is_file()
    assert not (merged / "adapter_config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(adapter.with_name("base"))
    served = AutoModelForCausalLM.from_pretrained(merged)
    changed = {name for name, new in served.state_dict().items() if not torch.equal(new, base.state_dict()[name])}
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}


def test_an_adapter_that_was_trained_anew_is_merged_anew(adapter: Path) -> None:
    merged = download(adapter)
    model = AutoModelForCausalLM.from_pretrained(adapter.with_name("base"))
    make_adapter(model, adapter, seed=1, r=4, target_modules=["q_proj"])
    assert download(adapter) != merged


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (None, "does not say which model the adapter is for"),
        ("", "does not say which model the adapter is for"),
        ("/absent/base", "there is no model folder /absent/base"),
        ("chef", "is an adapter itself"),
    ],
)
def test_a_base_model_that_cannot_be_had(adapter: Path, base: str | None, message: str) -> None:
    file = adapter / "adapter_config.json"
    named = str(adapter) if base == "chef" else base
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": named}))
    with pytest.raises(ModelUnavailable, match=message):
        download(adapter)


def test_what_is_wrong_with_an_adapter_is_reported_in_one_line_and_nothing_is_left(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelUnavailable, match=r"adapter_model.safetensors cannot be read: it is corrupt"):
        download(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match=r"has no adapter_model.safetensors and no adapter_model.bin"):
        download(adapter)
    assert not list(Path(constants.HF_HUB_CACHE).glob("merged/*"))
