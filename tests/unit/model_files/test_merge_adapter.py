"""A merged adapter: what `transformers` loads from the folder is the model that `peft` has merged."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.adapters import make_adapter
from tests.quantized_models import make_quantized
from tests.tiny_models import make
from tgi_server.engine.errors import InvalidAdapter
from tgi_server.engine.lora import BaseModel, read_adapter
from tgi_server.model_files.merge_adapter import merge_adapter

PROMPT = torch.tensor([[5, 7, 11, 13, 17]])


def merged_folder(folder: Path, adapter: Path) -> Path:
    """Merges with the engine, into a folder beside that of the adapter."""
    target = adapter.with_name("merged")
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    base = BaseModel.of(folder, AutoConfig.from_pretrained(folder))
    merge_adapter(read_adapter(adapter, base), base, target)
    return target


def assert_same_logits(merged: Path, expected: PreTrainedModel) -> None:
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(merged)(PROMPT).logits
        torch.testing.assert_close(ours, expected(PROMPT).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"r": 4, "target_modules": ["q_proj", "down_proj", "lm_head"], "use_dora": True}),
        ("opt", {"r": 2, "target_modules": ["q_proj", "fc1"], "bias": "lora_only"}),
        pytest.param(
            "gpt2",
            {"r": 2, "target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_merged_model_computes_what_the_one_merged_by_peft_does(
    tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    folder = make(architecture, tmp_path / "base")
    adapter, expected = make_adapter(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter", **settings)
    merged = merged_folder(folder, adapter)
    assert_same_logits(merged, expected)
    before, after = load_file(folder / "model.safetensors"), load_file(merged / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(torch.equal(before[name], after[name]) for name in before)


def test_files_are_changed_one_by_one_in_their_own_dtype(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(make("llama", folder), dtype=torch.bfloat16)
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    adapter, _ = make_adapter(model, tmp_path / "adapter", r=4, target_modules=["q_proj", "lm_head"])
    merged = merged_folder(folder, adapter)
    tensors = {name: tensor for file in merged.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert len(list(merged.glob("*.safetensors"))) == len(list(folder.glob("*.safetensors")))
    AutoModelForCausalLM.from_pretrained(merged)


def test_a_head_that_shares_its_weight_with_the_embeddings_gets_one_of_its_own(tmp_path: Path) -> None:
    """Which peft does not give it: there the embeddings change with the head, when it merges."""
    folder = make("opt", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(folder)
    adapter, _ = make_adapter(model, tmp_path / "adapter", r=4, target_modules=["lm_head", "q_proj"])
    from peft import PeftModel

    assert_same_logits(merged_folder(folder, adapter), PeftModel.from_pretrained(model, str(adapter)).eval())


def test_what_the_files_of_the_base_model_cannot_express_is_refused(tmp_path: Path) -> None:
    quantized, dense = make_quantized("gptq", tmp_path)
    adapter, _ = make_adapter(
        AutoModelForCausalLM.from_pretrained(dense), tmp_path / "adapter", r=2, target_modules=["q_proj"]
    )
    with pytest.raises(InvalidAdapter, match=r"is quantized as .*; serve the adapter beside it with --lora-adapters"):
        merged_folder(quantized, adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    bias = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias"
    save_file(tensors | {bias: torch.ones(64)}, adapter / "adapter_model.safetensors")
    shutil.rmtree(tmp_path / "merged")
    with pytest.raises(InvalidAdapter, match=r"adds a bias to model.layers.0.self_attn.q_proj, which has none"):
        merged_folder(dense, adapter)
