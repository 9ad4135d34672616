"""Adapters in GGUF files: the same layers and the same tokens as in the form of `peft`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.adapters import make_adapter
from tests.gguf_adapters import write_gguf_adapter
from tests.gguf_models import make_gguf
from tests.tiny_models import make
from tests.unit.engine.requests import Requests, generated, load_engine, load_reference, prompts
from tgi_server.engine.errors import InvalidAdapter
from tgi_server.engine.lora import BaseModel, read_adapter
from tgi_server.model_files.gguf_models import described

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TEXTS = prompts((1, 20, 5, 33))


def base_of(folder: Path) -> BaseModel:
    return BaseModel.of(folder, AutoConfig.from_pretrained(folder))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make("llama", tmp_path / "model")


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    """An adapter of peft."""
    folder = tmp_path / "peft"
    make_adapter(load_reference(model), folder, r=4, lora_alpha=8, target_modules=[*ATTENTION, "down_proj"])
    return folder


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("llama", [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]),
        *(
            pytest.param(architecture, names, marks=pytest.mark.slow)
            for architecture, names in (
                ("mistral", ATTENTION),
                ("qwen2", ATTENTION),
                ("gemma2", [*ATTENTION, "up_proj"]),
                ("phi3", ["qkv_proj", "o_proj", "gate_up_proj"]),
                ("qwen3_5_text", [*ATTENTION, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]),
            )
        ),
    ],
)
def test_layers_are_those_of_peft(architecture: str, names: list[str], tmp_path: Path) -> None:
    model = make(architecture, tmp_path / "model")
    folder, _ = make_adapter(load_reference(model), tmp_path / "peft", r=4, lora_alpha=6, target_modules=names)
    file = write_gguf_adapter(folder, model, tmp_path / "gguf" / "chef.gguf")
    base = base_of(model)
    expected = read_adapter(folder, base)
    for place in (file, file.parent):
        found = read_adapter(place, base)
        assert found.keys() == expected.keys()
        for path, layer in expected.items():
            torch.testing.assert_close((found[path].a, found[path].b), (layer.a, layer.b), rtol=0, atol=0)


def test_tokens_are_those_of_the_merged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On weights of transformers, and on those of a GGUF file."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    model = make("llama", tmp_path / "model")
    folder, merged = make_adapter(load_reference(model), tmp_path / "peft", r=4, lora_alpha=8, target_modules=ATTENTION)
    file = write_gguf_adapter(folder, model, tmp_path / "chef.gguf")
    base, _ = make_gguf(model, tmp_path / "base", "F32")
    merged.generation_config.eos_token_id = None
    with_adapter, plain = ([generated(each, TEXTS[1])] for each in (merged, load_reference(model)))
    for weights in (model, described(base)):
        engine = load_engine(weights)
        for adapter_id, place in (("gguf", file), ("peft", folder)):
            engine.adapters.put(adapter_id, engine.adapters.read(place))
        requests = Requests(engine, [TEXTS[1]] * 3, adapters=["gguf", "", "peft"])
        for index in range(3):
            requests.join(index)
        assert requests.finish() == with_adapter + plain + with_adapter


@pytest.mark.parametrize(("alpha", "scale"), [(6.0, 1.5), (0.0, 1.0)])
def test_alpha_is_divided_by_the_rank(alpha: float, scale: float, model: Path, adapter: Path, tmp_path: Path) -> None:
    base = base_of(model)
    plain = read_adapter(write_gguf_adapter(adapter, model, tmp_path / "a.gguf", adapter__lora__alpha=4.0), base)
    scaled = read_adapter(write_gguf_adapter(adapter, model, tmp_path / "b.gguf", adapter__lora__alpha=alpha), base)
    for path, layer in plain.items():
        torch.testing.assert_close(scaled[path].b, scale * layer.b)


def test_matrices_may_be_quantised(model: Path, adapter: Path, tmp_path: Path) -> None:
    base = base_of(model)
    plain = read_adapter(adapter, base)
    for path, layer in read_adapter(write_gguf_adapter(adapter, model, tmp_path / "a.gguf", "Q8_0"), base).items():
        torch.testing.assert_close(layer.a, plain[path].a, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"adapter__type": "control_vector"}, "adapter.type is 'control_vector'; only 'lora' is served"),
        ({"general__type": "model"}, r"chef.gguf is a model, not an adapter \(general.type is 'model'\)"),
        ({"adapter__lora__alpha": None}, "adapter.lora.alpha is None; a finite number is needed"),
        ({"adapter__lora__alpha": float("nan")}, "adapter.lora.alpha is nan; a finite number is needed"),
        ({"adapter__alora__invocation_tokens": [1, 2]}, "takes effect only after its adapter.alora.invocation_tokens"),
    ],
)
def test_what_is_not_read_is_named(metadata: Any, message: str, model: Path, adapter: Path, tmp_path: Path) -> None:
    file = write_gguf_adapter(adapter, model, tmp_path / "chef.gguf", **metadata)
    with pytest.raises(InvalidAdapter, match=message):
        read_adapter(file, base_of(model))


def test_an_adapter_of_another_architecture_or_size_is_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    file = write_gguf_adapter(adapter, model, tmp_path / "chef.gguf")
    other = make("qwen2", tmp_path / "other")
    expected = (
        r"chef.gguf is for models of the architecture 'llama' \(general.architecture\), and the base model is 'qwen2', "
        "which GGUF files call 'qwen2'"
    )
    with pytest.raises(InvalidAdapter, match=expected):
        read_adapter(file, base_of(other))
    wide = make("llama", tmp_path / "wide", hidden_size=128)
    with pytest.raises(InvalidAdapter, match=r"blk.0.attn_k.weight has the matrices \[4, 64\] and \[32, 4\], and its"):
        read_adapter(file, base_of(wide))


def test_a_damaged_file_and_several_files_are_one_line(model: Path, adapter: Path, tmp_path: Path) -> None:
    file = write_gguf_adapter(adapter, model, tmp_path / "two" / "chef.gguf")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidAdapter, match=r"chef.gguf is incomplete from tensor .*; download it again"):
        read_adapter(file, base_of(model))
    (file.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(InvalidAdapter, match=r"has several GGUF files; name one of them: chef.gguf, other.gguf"):
        read_adapter(file.parent, base_of(model))
