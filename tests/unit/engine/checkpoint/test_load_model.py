"""Loading a model from a folder."""

import builtins
import io
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.adapters import make_adapter
from tests.quantized_models import set_config
from tests.tiny_models import make, make_with_images
from tgi_server import demo_model
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.errors import InvalidWeights, ModelNotFound, UnsupportedModel


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        ("absent", ModelNotFound, "no model folder"),
        ("no config", ModelNotFound, "no config.json"),
        ("config", UnsupportedModel, "config.json cannot be read as JSON"),
        ("config that is a list", UnsupportedModel, "config.json is not a JSON object"),
        ("generation config", UnsupportedModel, "generation_config.json cannot be read as JSON"),
        ("generation config that is a list", UnsupportedModel, "generation_config.json is not a JSON object"),
        ("no weights", ModelNotFound, "has no model.safetensors; is the download complete"),
        ("no weights but pickled ones", ModelNotFound, "has only .bin weights; convert them with"),
        (
            "truncated",
            InvalidWeights,
            r"model.safetensors is corrupt or incomplete from tensor [\w.]+ on: it has [\d,]+ of [\d,]+ bytes; down",
        ),
        ("no file of weights", InvalidWeights, r"model.safetensors is corrupt or incomplete \(.*\); download it again"),
        ("float16 without kernels", UnsupportedModel, "--dtype bfloat16"),
    ],
)
def test_a_folder_that_cannot_be_loaded_says_why(tmp_path, broken, error, message) -> None:
    folder = tmp_path / "model"
    if broken != "absent":
        folder.mkdir()
        for file in demo_model.PATH.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    if broken == "no config":
        (folder / "config.json").unlink()
    if "config" in broken and broken != "no config":
        name = "generation_config.json" if "generation" in broken else "config.json"
        (folder / name).write_text("[]" if broken.endswith("list") else "{")
    if broken.startswith("no weights"):
        (folder / "model.safetensors").unlink()
    if "pickled" in broken:
        (folder / "pytorch_model.bin").touch()
    if broken == "truncated":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    if broken == "no file of weights":
        (folder / "model.safetensors").write_bytes(b"<html>not found</html>")
    without_kernels = broken == "float16 without kernels"
    dtype = torch.float16 if without_kernels else None
    with pytest.raises(error, match=message):
        Engine(EngineConfig(folder, dtype=dtype, custom_kernels=not without_kernels))


@pytest.mark.parametrize("outside", ["absolute", "above"])
def test_an_index_that_leads_out_of_its_folder_is_not_followed(tmp_path, outside) -> None:
    folder = make("llama", tmp_path / "model")
    weights = folder / "model.safetensors"
    other = weights.rename(tmp_path / "other.safetensors")
    name = str(other) if outside == "absolute" else "../other.safetensors"
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(load_file(other), name)}))
    with pytest.raises(InvalidWeights, match=f"names {name!r}, which is not a file of its folder"):
        Engine(EngineConfig(folder))


def split(folder: Path, stem: str = "model") -> None:
    """Puts the weights of a model into three files, without an index."""
    whole = folder / "model.safetensors"
    tensors = sorted(load_file(whole).items())
    whole.unlink()
    for part in range(3):
        save_file(dict(tensors[part::3]), folder / f"{stem}-{part + 1:05}-of-00003.safetensors", {"format": "pt"})


@pytest.mark.parametrize("stem", ["model", "pytorch_model"])
def test_files_without_an_index_are_one_model(tmp_path, stem) -> None:
    folder = make("llama", tmp_path)
    expected = load_model(EngineConfig(folder), torch.device("cpu")).state_dict()
    split(folder, stem)
    loaded = load_model(EngineConfig(folder), torch.device("cpu")).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_files_without_an_index_are_counted_and_of_one_model(tmp_path) -> None:
    folder = make("llama", tmp_path)
    split(folder)
    second = folder / "model-00002-of-00003.safetensors"
    other = second.rename(folder / "other-00001-of-00001.safetensors")
    with pytest.raises(InvalidWeights, match=r"weights of several models: model-00001-of-00003\.safetensors, "):
        load_model(EngineConfig(folder), torch.device("cpu"))
    other.unlink()
    with pytest.raises(ModelNotFound, match=r"has no model-00002-of-00003\.safetensors; is the download complete"):
        load_model(EngineConfig(folder), torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": "64"}, "Field 'hidden_size' expected int, got str"),
        ({"num_attention_heads": 3}, "hidden size .64. is not a multiple of the number of attention heads .3."),
        ({"dtype": "float17"}, "module 'torch' has no attribute 'float17'"),
    ],
)
def test_settings_that_cannot_be_are_reported_in_one_line(settings, message, tmp_path) -> None:
    set_config(make("llama", tmp_path), **settings)
    with pytest.raises(UnsupportedModel, match=rf"config.json cannot be used: .*{message}"):
        load_model(EngineConfig(tmp_path), torch.device("meta"))


ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
GEMMA_ROPE = {"full_attention": ROPE | {"factor": "8"}, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": "2.0"}}, r"rope_scaling\.factor is '2\.0'; a number is needed"),
        ({"rope_parameters": ROPE | {"factor": "4"}}, r"rope_parameters\.factor is '4'; a number is needed"),
        ({"rope_parameters": ROPE | {"factor": None}}, r"rope_parameters\.factor is None; a number is needed"),
        ({"rope_parameters": ROPE | {"factor": 0}}, r"rope_parameters\.factor is 0; a number above 0 is needed"),
        ({"rope_parameters": ROPE | {"rope_theta": "1e4"}}, r"rope_parameters\.rope_theta is '1e4'; a number"),
        ({"rope_parameters": ROPE | {"rope_theta": float("nan")}}, r"rope_parameters\.rope_theta is nan; a number"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1, "1"]}},
            r"\.short_factor\[1\] is '1'; a number",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "low_freq_factor": "1"}}, r"\.low_freq_factor is '1'; a number"),
        ({"text_config": {"rope_scaling": {"factor": "2"}}}, r"text_config\.rope_scaling\.factor is '2'; a number"),
        ({"rope_parameters": GEMMA_ROPE}, r"rope_parameters\.full_attention\.factor is '8'; a number is needed"),
        ({"rope_theta": "10000"}, r": rope_theta is '10000'; a number is needed"),
        ({"partial_rotary_factor": "0.5"}, r": partial_rotary_factor is '0\.5'; a number is needed"),
        ({"pad_token_id": 1_000_000}, r"pad_token_id is 1000000; it must be less than vocab_size, which is \d+"),
    ],
)
def test_a_setting_that_no_model_can_have_is_named(settings, message, tmp_path) -> None:
    set_config(make("llama", tmp_path), **settings)
    with pytest.raises(UnsupportedModel, match=rf"config\.json.*{message}") as error:
        load_model(EngineConfig(tmp_path), torch.device("meta"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "settings", [{"pad_token_id": -1}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "factor": None}}]
)
def test_settings_that_have_no_effect_may_be_anything(settings, tmp_path) -> None:
    set_config(make("llama", tmp_path), **settings)
    load_model(EngineConfig(tmp_path), torch.device("cpu"))


@pytest.mark.parametrize(
    ("architecture", "name", "shape", "message"),
    [
        (
            "llama",
            "mlp.down_proj.weight",
            (64, 95),
            r"model.layers.1.mlp.down_proj.weight is \[64, 95\], not \[64, 96\]",
        ),
        ("llama", "mlp.down_proj.weight", None, "weights are missing: model.layers.1.mlp.down_proj.weight"),
        ("mixtral", "block_sparse_moe.experts.1.w1.weight", (96, 63), r"experts.1.w1.weight has the shape \[96, 63\]"),
        (
            "mixtral",
            "block_sparse_moe.experts.1.w2.weight",
            None,
            "layers.1.block_sparse_moe.experts.1.w2.weight is miss",
        ),
        (
            "mixtral",
            "block_sparse_moe.experts.3.w1.weight",
            None,
            "layers.1.block_sparse_moe.experts.3.w1.weight is miss",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(architecture, name, shape, message, tmp_path) -> None:
    file = make(architecture, tmp_path) / "model.safetensors"
    name = f"model.layers.1.{name}"
    tensors = {other: tensor for other, tensor in load_file(file).items() if other != name}
    save_file(tensors | ({name: torch.zeros(shape)} if shape else {}), file)
    with pytest.raises(InvalidWeights, match=message):
        load_model(EngineConfig(tmp_path), torch.device("cpu"))


@pytest.mark.parametrize("model_type", ["gemma3", "llama4"])
def test_a_model_that_also_reads_images_has_the_dtype_of_its_checkpoint(model_type, tmp_path) -> None:
    folder = make_with_images(model_type, tmp_path)
    assert load_model(EngineConfig(folder), torch.device("meta")).dtype == torch.bfloat16


def test_of_a_model_that_also_reads_images_the_text_model_is_loaded(tmp_path) -> None:
    model = load_model(EngineConfig(make_with_images("qwen2_5_vl", tmp_path)), torch.device("cpu"))
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(
        parameter.numel() for parameter in [*model.get_decoder().parameters(), model.get_output_embeddings().weight]
    )


def test_a_checkpoint_that_does_not_say_its_dtype_has_that_of_its_weights(tmp_path) -> None:
    file = make("llama", tmp_path) / "model.safetensors"
    weights = {name: tensor.half() for name, tensor in load_file(file).items()}
    save_file(weights | {"model.norm.weight": torch.ones(64)}, file)
    set_config(tmp_path, dtype=None)
    assert load_model(EngineConfig(tmp_path), torch.device("meta")).dtype == torch.float16


def test_weights_go_to_the_device_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device that only knows shapes stands in for a GPU: what has been there never was in host memory."""
    before: list[set[str]] = []
    move = PreTrainedModel.to

    def moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
        codes = [module.quantized.codes for module in model.modules() if isinstance(module, QuantizedLinear)]
        before.append({tensor.device.type for tensor in (*model.parameters(), *codes)})
        return move(model, device)

    monkeypatch.setattr(PreTrainedModel, "to", moved)
    for device, quantize in (("meta", None), ("meta", "fp8"), ("cpu", None)):
        load_model(EngineConfig(demo_model.PATH, dtype=torch.bfloat16, quantize=quantize), torch.device(device))
    assert before == [{"meta"}, {"meta"}, {"cpu"}]


def test_an_adapter_beside_a_model_is_not_part_of_it(tmp_path) -> None:
    folder = make("llama", tmp_path)
    model = load_model(EngineConfig(folder), torch.device("cpu"))
    make_adapter(model, folder)
    found = load_model(EngineConfig(folder), torch.device("cpu")).state_dict()
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_each_file_of_settings_is_read_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the files that say what a model is, two readers could make different things."""
    folder = make("llama", tmp_path)
    opened: Counter[str] = Counter()

    def counting(file, *arguments, **named):
        opened[Path(file).name] += isinstance(file, str | Path) and Path(file).parent == folder
        return plain(file, *arguments, **named)

    plain = io.open
    monkeypatch.setattr(io, "open", counting)
    monkeypatch.setattr(builtins, "open", counting)
    Engine(EngineConfig(folder, dtype=torch.float32))
    assert opened["config.json"] == opened["generation_config.json"] == 1
