"""Adapters of tiny models, as `peft` writes them, with random weights.

folder, merged = make_adapter(model, tmp_path / "adapter", r=4, target_modules=["q_proj"])
"""

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

NOISE = 0.1
"""Deviation of all tensors of an adapter; DoRA's magnitudes begin at those of the base model."""


def make_adapter(
    model: PreTrainedModel, folder: Path, *, seed: int = 0, **settings: Any
) -> tuple[Path, PreTrainedModel]:
    """Saves an adapter of the model, whose settings are those of peft's LoraConfig, and returns its folder.

    Returns, too, the model with which peft has merged it. The given model stays what it is.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
        with torch.no_grad():
            for name, tensor in adapted.named_parameters():
                if _is_trained(name, settings):
                    tensor.add_(torch.randn_like(tensor), alpha=NOISE)
    adapted.save_pretrained(folder)
    return folder, adapted.merge_and_unload()


def _is_trained(name: str, settings: dict[str, Any]) -> bool:
    return "lora_" in name or (settings.get("bias") == "lora_only" and name.endswith("base_layer.bias"))


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Puts other tensors into an adapter's folder."""
    from safetensors.torch import save_file

    save_file(tensors, folder / "adapter_model.safetensors")
