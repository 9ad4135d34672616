"""Models of newer families have the tensors and the settings in GGUF files that they have in `transformers`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.gguf_by_names import SETTINGS, write_gguf
from tests.tiny_models import make
from tgi_server.engine.checkpoint.quantized.gguf_tensors import gguf_tensors
from tgi_server.gguf.architectures import config_of
from tgi_server.gguf.file import read_gguf

# Of the file, and of text and images.
UNEQUAL = {"_name_or_path", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "transformers_version"}


@pytest.mark.parametrize(
    "architecture",
    [
        "qwen3_next",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("falcon_h1", "gemma3n_text", "gemma4_text", "gemma4_text_moe", "granitemoehybrid"),
                *("granitemoehybrid dense", "jamba", "lfm2", "lfm2_moe", "mamba", "nemotron_h"),
                *("qwen3_5_moe_text", "qwen3_5_text"),
            )
        ),
    ],
)
def test_tensors_and_settings_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = make(architecture.split()[0], tmp_path / "model", **SETTINGS.get(architecture, {}))
    file = read_gguf(write_gguf(model, tmp_path / "model.gguf"))
    found = gguf_tensors(file)
    expected = load_file(model / "model.safetensors")
    if architecture == "nemotron_h":  # of which the model itself has other names than its files
        expected = {name.replace("backbone.", "model."): tensor for name, tensor in expected.items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # Norms lose their last bit to the 1 that files add, and A to the exponential.
        torch.testing.assert_close(
            found[name][...], tensor, rtol=0, atol=1e-6 if "norm" in name or "A_log" in name else 0
        )
    (tmp_path / "config.json").write_text(json.dumps(config_of(file)))
    settings, wanted = (AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path, model))
    for name in wanted.keys() - UNEQUAL:
        assert settings[name] == (pytest.approx(wanted[name]) if type(wanted[name]) is float else wanted[name]), name
