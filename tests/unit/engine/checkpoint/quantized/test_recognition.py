"""What a quantised checkpoint says of itself, and refusals of one line that say what is wrong."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.quantized_models import make_quantized, set_config
from tests.tiny_models import make
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tgi_server.engine.checkpoint.quantized import find_quantization
from tgi_server.engine.checkpoint.reader import open_checkpoint
from tgi_server.engine.errors import InvalidWeights, UnsupportedModel


@pytest.fixture(scope="module")
def gptq(tmp_path_factory) -> Path:
    return make_quantized("gptq", tmp_path_factory.mktemp("gptq"))[0]


def copied(folder: Path, to: Path) -> Path:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of layer 0's query projection; None removes one."""
    file = folder / "model.safetensors"
    found = load_file(file)
    for name, tensor in tensors.items():
        full = f"model.layers.0.self_attn.q_proj.{name}"
        if tensor is None:
            del found[full]
        else:
            found[full] = tensor
    save_file(found, file)


@pytest.mark.parametrize(
    ("layout", "text", "names"),
    [
        ("gptq_act_order", "GPTQ, 4 bits, groups of 32, act-order", ("gptq", "marlin")),
        ("awq", "AWQ, 4 bits, groups of 32", ("awq",)),
        ("fp4_double", "bitsandbytes, fp4, double quantised", ("bitsandbytes-fp4",)),
        ("w8a16", "compressed-tensors, 8 bits", ("compressed-tensors",)),
        ("fp8_rows", "compressed-tensors, FP8", ("compressed-tensors", "fp8")),
        ("fp8_blocks", "FP8, blocks of 32 x 32", ("fp8",)),
    ],
)
def test_what_is_found_has_a_text_and_names(layout, text, names, tmp_path) -> None:
    folder, _ = make_quantized(layout, tmp_path, num_hidden_layers=1)
    config = AutoConfig.from_pretrained(folder)
    for name in (None, *names):
        found = find_quantization(folder, config, name)
        assert found is not None
        assert found.text == text


def test_the_engine_says_what_serves(gptq) -> None:
    info = load_engine(gptq).info
    assert info.quantization == "GPTQ, 4 bits, groups of 32"
    assert info.linear_kernels == "fma (int4), fma"
    assert info.forward_pass == "one kernel call"


def test_inputs_are_rounded_to_8_bits_only_where_that_is_requested(gptq) -> None:
    if "w4a8" not in torch.ops.oatmill.quantized_kernels("int4"):
        pytest.skip("this CPU has no such kernel")
    engine = load_engine(gptq, linear_kernels="w4a8")
    assert engine.info.linear_kernels == "w4a8 (int4), fma"
    with pytest.raises(UnsupportedModel, match=r"this CPU has no magic for these weights; it has fma, .*w4a8"):
        load_engine(gptq, linear_kernels="magic")


def test_older_files_and_tensors_tell_it_as_well(gptq, tmp_path) -> None:
    for place, written in {
        "file": {"quantize_config.json": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}},
        "tensors": {},
    }.items():
        folder = tmp_path / place
        folder.mkdir()
        set_config(copied(gptq, folder), quantization_config=None)
        for name, content in written.items():
            (folder / name).write_text(json.dumps(content))
        if not written:
            file = folder / "model.safetensors"
            settings = {"gptq_bits": torch.tensor([4]), "gptq_groupsize": torch.tensor([32])}
            save_file(load_file(file) | settings, file)
        assert load_engine(folder).info.quantization == "GPTQ, 4 bits, groups of 32"


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path) -> None:
    folder, dense = make_quantized("modelopt_fp8", tmp_path)
    set_config(folder, quantization_config=None)
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    written = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": own}
    (folder / "hf_quant_config.json").write_text(json.dumps(written))
    engine = load_engine(folder)
    assert engine.info.quantization == "ModelOpt, FP8"
    assert generate_together(engine, prompts((5, 9))) == generate_together(load_engine(dense), prompts((5, 9)))
    for setting, value in (("quant_algo", "NVFP4"), ("quant_algo", "W4A8_AWQ"), ("kv_cache_quant_algo", "NVFP4")):
        changed = written | {"quantization": own | {setting: value}}
        (folder / "hf_quant_config.json").write_text(json.dumps(changed))
        with pytest.raises(UnsupportedModel, match=f"the {setting} '{value}', which is not read; FP8 is"):
            load_engine(folder)


def test_another_quantisation_cannot_be_requested(gptq) -> None:
    for name in ("awq", "int8", "bitsandbytes-nf4"):
        with pytest.raises(
            UnsupportedModel, match=f"--quantize {name} contradicts the checkpoint, whose weights are GPTQ"
        ):
            load_engine(gptq, quantize=name)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "exl2"}, "quantised as exl2, which is not read; take the same model as GPTQ"),
        ({"quant_method": "hqq"}, "quantised as hqq, which is not read"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "for the kernel marlin; take the same model"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "bitblas"}, "for the kernel bitblas"),
        ({"quant_method": "gptq", "bits": 9}, "has 9 bits; from 2 to 8 can be read"),
        ({"quant_method": "gptq"}, "its settings cannot be used .KeyError: 'bits'."),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "has the layout gemv"),
        ({"quant_method": "awq", "bits": 3}, "has 3 bits"),
        *(
            ({"quant_method": "gptq", "bits": 4, "dynamic": dynamic}, message)
            for dynamic, message in (
                ({"+:.*q_proj": {"bits": 12}}, r"dynamic\['\+:\.\*q_proj'\]\.bits is 12, which is not read"),
                ({".*q_proj": {"adapter": {"rank": 8}}}, r"dynamic\['\.\*q_proj'\]\.adapter is .* not supported"),
                ({".*q_proj": {"method": "qqq"}}, r"\.method is 'qqq', which is not supported"),
                ({".*q_proj": 8}, r"dynamic\['\.\*q_proj'\] is 8; an object is needed"),
                (["a"], r"quantization_config\.dynamic is \['a'\]; an object is needed"),
            )
        ),
        *(
            ({"quant_method": "auto-round", "bits": 4, "packing_format": f"auto_round:auto_{layout}"} | more, message)
            for layout, more, message in (
                ("gptq", {"extra_config": {"a": {"bits": 9}}}, r"extra_config\['a'\]\.bits is 9, which is not read"),
                ("awq", {"extra_config": {"a": {"bits": 8}}}, r"extra_config\['a'\]\.bits is 8, which is not read"),
                ("gptq", {"extra_config": {"a": {"data_type": "mx_fp"}}}, r"\['a'\]\.data_type is 'mx_fp', which is"),
                ("gptq", {"extra_config": {"a": {"act_bits": 8}}}, r"\['a'\]\.act_bits is 8; inputs are not"),
                ("gptq", {"data_type": "nv_fp"}, "has the data_type 'nv_fp', which is not read"),
                ("round", {}, "quantised as auto-round, auto_round:auto_round, which is not read"),
            )
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "has the quant_algo 'NVFP4', which is not read; FP8 is"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {}}}, "format marlin-24"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}}},
            },
            "has weights packed in 3 bits; 2, 4 and 8 can be read",
        ),
        *(
            ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}, message)
            for groups, message in (
                ({"a": {"weights": None}}, r"config_groups\.a\.weights is None; an object is needed"),
                ({"a": None}, r"config_groups\.a is None; an object is needed"),
                ({}, r"config_groups is \{\}; an object with a group is needed"),
                (["a"], r"config_groups is \['a'\]; an object with a group is needed"),
                ({"a": {"weights": {"type": "int"}}}, r"config_groups\.a\.weights\.num_bits is None; a whole number"),
                ({"a": {"weights": {"num_bits": "four"}}}, r"config_groups\.a\.weights\.num_bits is 'four'; a whole"),
            )
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}},
                "transform_config": {"config_groups": {"u": {"apply": [{"location": "input", "targets": ["Linear"]}]}}},
            },
            "rotates activations .transform_config., which is not done; take the same model",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 128]},
            "its settings cannot be used .ValueError: blocks of 0",
        ),
    ],
)
def test_what_is_not_read_says_so(settings: dict[str, Any], said, tmp_path) -> None:
    folder = make("llama", tmp_path, num_hidden_layers=1)
    set_config(folder, quantization_config=settings)
    with pytest.raises(UnsupportedModel, match=said):
        load_engine(folder)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"qzeros": None}, r"q_proj.qzeros is missing beside .*q_proj.qweight"),
        ({"scales": torch.ones(3, 64).half()}, r"q_proj.scales has the shape \[3, 64\], where \[2, 64\] is expected"),
        ({"qweight": torch.ones(512).int()}, r"q_proj.qweight has the shape \[512\], where 2 dimensions are expected"),
        ({"qweight": torch.ones(8, 64)}, r"q_proj.qweight is of float32, where int32 is expected"),
        ({"qweight": torch.ones(7, 64).int()}, r"q_proj.qweight has the shape \[7, 64\], where \[8, 64\] is expected"),
        ({"g_idx": torch.full((64,), 2).int()}, r"q_proj.g_idx has groups from 2 to 2; there are 2"),
        ({"qweight": torch.ones(8, 48).int(), "scales": torch.ones(2, 48).half()}, r"q_proj"),
    ],
)
def test_tensors_that_do_not_fit_are_named(gptq, tensors, said, tmp_path) -> None:
    change_tensors(copied(gptq, tmp_path), **tensors)
    with pytest.raises(InvalidWeights, match=said):
        load_engine(tmp_path)


@pytest.mark.parametrize("layout", ["fp8_rows", "w8a8"])
def test_codes_without_a_scale_are_not_taken_for_numbers(layout, tmp_path) -> None:
    folder, _ = make_quantized(layout, tmp_path, num_hidden_layers=1)
    change_tensors(folder, weight_scale=None)
    with pytest.raises(InvalidWeights, match=r"q_proj.weight is quantised \(\w+\), but the tensors beside it"):
        load_engine(folder)


def test_codes_of_experts_in_one_tensor_are_not_taken_for_numbers(tmp_path) -> None:
    folder = make("llama4_text", tmp_path, num_hidden_layers=1)
    file, name = folder / "model.safetensors", "model.layers.0.feed_forward.experts.down_proj"
    tensors = load_file(file)
    codes = {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(2, 1, 64)}
    save_file(tensors | codes, file)
    set_config(folder, quantization_config={"quant_method": "fbgemm_fp8"})
    with pytest.raises(UnsupportedModel, match=r"experts.down_proj has all experts of a layer in F8_E4M3, which is"):
        load_engine(folder)


@pytest.mark.parametrize(
    ("layout", "said", "message"),
    [
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "__nf4 is of a weight in nf4, but config.json says fp4"),
        ("nf4", {"load_in_8bit": True}, "__nf4 is of a weight in nf4, but config.json says int8"),
        ("bitsandbytes_int8", {"load_in_8bit": False}, "SCB is of a weight in int8, but config.json says fp4"),
    ],
)
def test_weights_of_bitsandbytes_are_of_the_kind_that_is_said(layout, said, message, tmp_path) -> None:
    folder, _ = make_quantized(layout, tmp_path, num_hidden_layers=1)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    set_config(folder, quantization_config=settings | said)
    with pytest.raises(InvalidWeights, match=message):
        load_engine(folder)


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_scales_that_are_no_numbers_are_named(scale, tmp_path) -> None:
    folder, _ = make_quantized("fbgemm", tmp_path, num_hidden_layers=1)
    change_tensors(folder, weight_scale=torch.full((64, 1), scale))
    with pytest.raises(InvalidWeights, match=r"scales of tensor .*q_proj.weight are not all finite"):
        load_engine(folder)


def test_exponents_that_are_no_numbers_are_named(tmp_path) -> None:
    folder, _ = make_quantized("mxfp4", tmp_path, "gpt_oss", num_hidden_layers=1)
    file, parameter = folder / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(file)
    tensors[f"{parameter}_scales"][-1, -1, -1] = 255
    save_file(tensors, file)
    found = find_quantization(folder, AutoConfig.from_pretrained(folder), None)
    message = rf"tensor {parameter}_scales has .* NaN"
    with open_checkpoint(folder, quantization=found) as opened, pytest.raises(InvalidWeights, match=message):
        opened[parameter][...]


def test_quantised_tensors_that_nothing_tells_about_are_not_taken_for_numbers(tmp_path) -> None:
    folder, _ = make_quantized("fp8_blocks", tmp_path, num_hidden_layers=1)
    set_config(folder, quantization_config=None)
    with pytest.raises(UnsupportedModel, match=r"has quantised weights, but .* does not say how"):
        load_engine(folder)


def test_a_truncated_file_is_refused(gptq, tmp_path) -> None:
    weights = copied(gptq, tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(InvalidWeights, match=r"model.safetensors is corrupt or incomplete from tensor [\w.]+ on"):
        load_engine(tmp_path)
