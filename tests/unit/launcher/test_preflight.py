"""What the model's files show is found before anything is started."""

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.settings import read_settings
from tests.gguf_adapters import write_gguf_adapter
from tgi_server.engine.checkpoint.quantized.recognition import find_quantization
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS
from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.preflight import check_model
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.shard.settings import QUANTIZE_OF_METHOD, ROUNDED_BYTES


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A tiny Llama in float32 that may be written to."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def check(folder: Path, *flags: str) -> None:
    check_model(read_settings(LauncherSettings, "launcher", [f"--model-id={folder}", *flags]), folder)


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def complaint(folder: Path, *flags: str) -> str:
    with pytest.raises(CannotStartError) as error:
        check(folder, *flags)
    return str(error.value)


def adapter(place: Path, inputs: int = 32, **values: Any) -> str:
    place.mkdir()
    config = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": "maker/larger", **values}
    (place / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": torch.zeros(2, inputs), f"{name}.lora_B.weight": torch.zeros(32, 2)}
    save_file(tensors, place / "adapter_model.safetensors")
    return f"--lora-adapters=chef={place}"


def width(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["hidden_size"])


def test_a_model_that_can_be_served(folder: Path, tmp_path: Path) -> None:
    check(folder)
    check(folder, "--quantize=int4", "--cpu-memory=1MiB", adapter(tmp_path / "chef", width(folder)))


def test_a_model_type_that_transformers_does_not_have(folder: Path) -> None:
    change(folder, model_type="lama")
    assert "the installed transformers has no model of the type 'lama'; a newer release may" in complaint(folder)
    change(folder, auto_map={"AutoModelForCausalLM": "modeling_lama.LamaForCausalLM"})
    assert "it comes with its own code, which runs only with --trust-remote-code" in complaint(folder)
    check(folder, "--trust-remote-code")


@pytest.mark.parametrize("flag", ["awq", "gptq", "marlin", "compressed-tensors"])
def test_a_format_that_the_checkpoint_does_not_have(folder: Path, flag: str) -> None:
    assert complaint(folder, f"--quantize={flag}").startswith(f"--quantize {flag} is for checkpoints that are quantiz")
    change(folder, quantization_config={"quant_method": "mxfp4"})
    told = complaint(folder, f"--quantize={flag}")
    assert told.startswith(f"--quantize {flag} contradicts the checkpoint, which is quantized as mxfp4")


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {"quant_method": "fp8"},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "mxfp4"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ],
    ids=str,
)
def test_what_a_shard_takes_is_taken(folder: Path, settings: dict[str, Any]) -> None:
    from transformers import AutoConfig

    change(folder, quantization_config=settings)
    found = find_quantization(folder, AutoConfig.from_pretrained(folder), None)
    assert found is not None
    assert found.names <= set(QUANTIZE_OF_METHOD[settings["quant_method"].replace("_", "-")])
    for name in found.names:
        check(folder, f"--quantize={name}")


def test_the_ways_to_round_are_those_of_a_shard() -> None:
    assert set(ROUNDED_BYTES) == set(ROUNDINGS)


def test_weights_that_are_cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    told = complaint(folder)
    assert f"{file} is corrupt or incomplete from tensor " in told
    assert f"it has {len(content) - 100:,} of {len(content):,} bytes; download it again" in told
    file.write_bytes(content[:100])
    assert complaint(folder) == f"{file} is corrupt or incomplete (no header can be read); download it again"


def test_a_file_that_the_index_names_and_is_not_there(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")})
    )
    assert complaint(folder).startswith(f"{folder} lacks model-00001-of-00002.safetensors, which model.safetensors.ind")


@pytest.mark.parametrize("name", ["/etc/model.safetensors", "../model.safetensors", "a/../../b.safetensors"])
def test_an_index_that_leads_out_of_its_folder(folder: Path, name: str) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert complaint(folder) == f"{index} names {name!r}, which is not a file of its folder; it is not loaded"


def test_an_adapter_of_another_base(folder: Path, tmp_path: Path) -> None:
    told = complaint(folder, adapter(tmp_path / "chef", 4096))
    assert "q_proj.lora_A.weight is [2, 4096], but model.layers.0.self_attn.q_proj.weight of the model is [" in told
    assert told.endswith("the adapter was made for maker/larger")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA adapters are served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], and whole modules are not served"),
    ],
)
def test_an_adapter_of_another_kind(folder: Path, tmp_path: Path, values: dict[str, Any], told: str) -> None:
    assert told in complaint(folder, adapter(tmp_path / "chef", width(folder), **values))


def test_weights_that_do_not_fit_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    memory = psutil.virtual_memory()._replace(available=int(weights * 0.9))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert complaint(folder).startswith("the model's weights take 0.0 GiB, and 0.0 GiB of memory are available")
    check(folder, "--dtype=bfloat16")
    check(folder, "--quantize=int8")


def test_weights_that_lie_there_a_second_time_are_not_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral's repositories have them in their own format, too."""
    weights = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    tensors = load_file(folder / "model.safetensors")
    save_file({f"own.{name}": tensor for name, tensor in tensors.items()}, folder / "consolidated.safetensors")
    memory = psutil.virtual_memory()._replace(available=int(weights * 1.1))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    check(folder)


def test_a_cache_that_is_larger_than_the_machine(folder: Path) -> None:
    told = complaint(folder, "--cpu-memory=900TiB")
    assert told.startswith("--cpu-memory is 921600.0 GiB and the model's weights take 0.0 GiB, but ")
    assert told.endswith("; lower --cpu-memory")


def test_an_adapter_in_a_gguf_file(folder: Path, tmp_path: Path) -> None:
    peft = adapter(tmp_path / "peft", width(folder), lora_alpha=4).partition("chef=")[2]
    file = write_gguf_adapter(Path(peft), folder, tmp_path / "chef.gguf")
    flag = f"--lora-adapters=chef={file}"
    check(folder, flag)
    change(folder, model_type="qwen2")
    assert complaint(folder, flag) == (
        f"--lora-adapters: chef: {file} is for models of the architecture 'llama' (general.architecture), and the base "
        "model is 'qwen2', which GGUF files call 'qwen2'"
    )
    change(folder, model_type="llama")
    peft = adapter(tmp_path / "wide", 4096, lora_alpha=4).partition("chef=")[2]
    write_gguf_adapter(Path(peft), folder, file)
    assert "chef: blk.0.attn_q.weight.lora_a is [2, 4096], but that weight of the model is [" in complaint(folder, flag)
