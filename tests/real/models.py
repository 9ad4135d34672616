"""The trained models that the tests of this folder run, and what `transformers` makes of their files.

They lie in the folder that OATMILL_REAL_MODELS names, or else `tools.real_models` fetches them into `runs/real_models`.
What `transformers` reads from a GGUF file is stored once in `runs/real_dequantized`, since reading takes minutes.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tools.real_models import MODELS, fetch

_RUNS = Path(__file__).parents[2] / "runs"
# Folders in it are named as `benchmarks.perplexity` expects those of its --work.
DEQUANTIZED = _RUNS / "real_dequantized"


def model_path(name: str) -> Path:
    """Returns the path of a model of `tools.real_models`; skips the test if the folder of the models lacks it."""
    if (given := os.environ.get("OATMILL_REAL_MODELS")) is None:
        return fetch(name, _RUNS / "real_models")
    path = Path(given) / MODELS[name].name
    if not path.exists():
        pytest.skip(f"OATMILL_REAL_MODELS has no {MODELS[name].name}; python -m tools.real_models {given} {name}")
    return path


def dequantized(name: str) -> Path:
    """Returns a folder with the weights of a GGUF file in float32 and its tokenizer, as `transformers` reads them."""
    file = model_path(name)
    folder = DEQUANTIZED / f"{file.stem}-dense"
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        del model.config.quantization_config
        model.config.save_pretrained(partial)
        model.generation_config.save_pretrained(partial)
        save_model(model, str(partial / "model.safetensors"), metadata={"format": "pt"})
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
        partial.rename(folder)
    return folder


@cache
def reference_tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(dequantized(name))


def reference_model(name: str) -> PreTrainedModel:
    """Returns the model of `transformers`, in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(dequantized(name), dtype=torch.float32)
    return model.eval()
