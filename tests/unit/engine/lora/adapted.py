"""A tiny model with five adapters of other ranks, other layers and other kinds, for engines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.adapters import make_adapter
from tests.unit.engine.requests import LENGTHS, generated, load_reference, prompts
from tgi_server.engine import Engine

ADAPTERS = 5
# Names that peft refuses, or takes for those of experts or of decoder layers; and of layers that are not called.
_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj"}
_UNADAPTED = {
    **dict.fromkeys(("qwen3_next", "llama4_text"), _OF_EXPERTS | {"router"}),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        _OF_EXPERTS | {"router", "kv_b_proj"},
    ),
    "minicpm3": {"kv_b_proj"},
    "youtu": {"kv_b_proj"},
    "gemma3n_text": {"0", "1", "2"},
    "mamba": {"out_proj", "dt_proj"},
    "jamba": {"out_proj", "dt_proj"},
    "falcon_h1": {"out_proj"},  # which peft refuses
    "nemotron_h": {"out_proj"},
    "kimi_linear": _OF_EXPERTS | {"router", "kv_b_proj"},
}


@dataclass(frozen=True)
class AdaptedModel:
    """adapters: folders by id. merged: the model that peft makes with each; under the empty id the base model."""

    folder: Path
    adapters: dict[str, Path]
    merged: dict[str, PreTrainedModel]

    def ids(self) -> list[str]:
        """Returns the adapter of each of sixteen requests; empty for those of the base model."""
        return [list(self.merged)[index % len(self.merged)] for index in range(len(LENGTHS))]

    def expected(self) -> list[list[int]]:
        """Returns what the merged models write for the sixteen requests."""
        return [generated(self.merged[each], text) for each, text in zip(self.ids(), prompts(), strict=True)]

    def load(self, engine: Engine, *ids: str) -> None:
        """Has an engine read and hold adapters; all if none is named."""
        for each in ids or self.adapters:
            if each:
                engine.adapters.put(each, engine.adapters.read(self.adapters[each]))


def make_adapted(folder: Path, count: int = ADAPTERS) -> AdaptedModel:
    """Makes adapters of the model in a folder, beside it."""
    model = load_reference(folder)
    names = _linear_names(model)
    some, others = names[::2], names[1::2] or names
    head = [] if model.config.tie_word_embeddings else _head(model)
    settings: list[dict[str, Any]] = [
        {"r": 4, "lora_alpha": 8, "target_modules": names},
        {"r": 3, "lora_alpha": 6, "target_modules": some, "use_dora": True},
        {"r": 16, "lora_alpha": 8, "target_modules": others, "use_rslora": True},
        {"r": 2, "lora_alpha": 4, "target_modules": [*names[:1], *head], "rank_pattern": {names[0]: 5}},
        {"r": 1, "lora_alpha": 4, "target_modules": names, "bias": "lora_only"},
    ]
    adapters, merged = {}, {"": model}
    for number, each in enumerate(settings[:count]):
        place = folder.with_name(f"{folder.name}-adapter-{number}")
        adapters[f"a{number}"], merged[f"a{number}"] = make_adapter(model, place, seed=number, **each)
        merged[f"a{number}"].generation_config.eos_token_id = None
    return AdaptedModel(folder, adapters, merged)


def _linear_names(model: PreTrainedModel) -> list[str]:
    """Returns the last names of the linear layers that compute every token, but the head."""
    head = model.get_output_embeddings()
    names = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and ".experts." not in path
    }
    return sorted(names - _UNADAPTED.get(model.config.model_type, set()))


def _head(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    return [path.rpartition(".")[2] for path, module in model.named_modules() if module is head]
