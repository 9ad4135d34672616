"""The trained models that the tests of this folder run, and what `transformers` makes of their files.

They lie in the folder that OATMILL_REAL_MODELS names, or else `tools.real_models` fetches them into `runs/real_models`.
Configurations and tokenizers are those that `transformers` reads from a GGUF file, which takes it a minute or two, and
which are stored once in `runs/real_references`. The weights in float32 are those of `benchmarks.perplexity`, since
`transformers` needs twice the memory of a model to dequantize it.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.perplexity import dense_copy, model_folder
from tools.real_models import MODELS, fetch

_RUNS = Path(__file__).parents[2] / "runs"
# Folders of copies, named as `benchmarks.perplexity` names those of its --work.
COPIES = _RUNS / "real_copies"


def model_path(name: str) -> Path:
    """Returns the path of a model of `tools.real_models`; skips the test if the folder of the models lacks it."""
    if (given := os.environ.get("OATMILL_REAL_MODELS")) is None:
        return fetch(name, _RUNS / "real_models")
    path = Path(given) / MODELS[name].name
    if not path.exists():
        pytest.skip(f"OATMILL_REAL_MODELS has no {MODELS[name].name}; python -m tools.real_models {given} {name}")
    return path


@cache
def reference_folder(name: str) -> Path:
    """Returns a folder with the configuration and the tokenizer that `transformers` reads from a GGUF file."""
    file = model_path(name)
    folder = _RUNS / "real_references" / file.stem
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        AutoConfig.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
        partial.rename(folder)
    return folder


@cache
def reference_tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(reference_folder(name))


def reference_model(name: str) -> PreTrainedModel:
    """Returns the model of `transformers` with the dequantized weights, in float32."""
    file = model_path(name)
    weights = dense_copy(model_folder(file), COPIES / f"{file.stem}-dense")
    config = AutoConfig.from_pretrained(reference_folder(name))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(weights, config=config, dtype=torch.float32)
    return model.eval()
