"""An adapter's adapter_config.json, as `peft` writes it: https://huggingface.co/docs/peft/package_reference/lora."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from tgi_server.engine.errors import InvalidAdapter

CONFIG = "adapter_config.json"
MAX_RANK = 256

T = TypeVar("T")

# Settings that are honoured, or that say nothing about what a trained adapter computes.
_HONOURED = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias", "lora_bias"}
_OF_TRAINING = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "fan_in_fan_out", "init_lora_weights", "eva_config", "loftq_config", "corda_config"),
    *("lora_ga_config", "megatron_config", "megatron_core", "ensure_weight_tying", "qalora_group_size"),
    *("runtime_config", "velora_config"),
}
# Ways to begin a training that leave the base model's weights as they are.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of a LoRA adapter that say what it computes.

    biases: the adapted layers' biases were trained too, and stand in the place of the base model's.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilised: bool
    dora: bool
    biases: bool
    base_model: str | None
    base_revision: str | None

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Reads the folder's adapter_config.json. Raises InvalidAdapter for what is not honoured, by its name."""
        file = folder / CONFIG
        settings = _read(file)
        kind = settings.get("peft_type")
        if kind != "LORA":
            raise InvalidAdapter(f"{file}: peft_type is {kind!r}; only LORA adapters are served")
        if modules := settings.get("modules_to_save"):
            raise InvalidAdapter(
                f"{file}: modules_to_save is {modules}: whole modules in the place of the base model's are not served "
                "beside it; merge the adapter with peft, and serve the merged model"
            )
        for name, value in settings.items():
            if value and name not in _HONOURED | _OF_TRAINING:
                raise InvalidAdapter(
                    f"{file}: {name} is {value!r}, which is not supported; merge the adapter with peft, and serve the "
                    "merged model"
                )
        if (start := settings.get("init_lora_weights")) not in _PLAIN_STARTS:
            raise InvalidAdapter(
                f"{file}: init_lora_weights is {start!r}, which changes the base model's weights; save the adapter "
                "with peft's path_initial_model_for_weight_conversion"
            )
        if (bias := settings.get("bias", "none")) not in ("none", "lora_only"):
            raise InvalidAdapter(f"{file}: bias is {bias!r}; it may be 'none' or 'lora_only'")
        try:
            return cls._of(settings)
        except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
            raise InvalidAdapter(f"{file} is not as peft writes it ({type(error).__name__}: {error})") from error

    @classmethod
    def _of(cls, settings: Mapping[str, Any]) -> Self:
        rank_pattern = {key: int(value) for key, value in (settings.get("rank_pattern") or {}).items()}
        alpha_pattern = {key: float(value) for key, value in (settings.get("alpha_pattern") or {}).items()}
        for key in (*rank_pattern, *alpha_pattern):
            re.compile(key)
        base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
        return cls(
            rank=int(settings["r"]),
            alpha=float(settings.get("lora_alpha", 8)),
            rank_pattern=rank_pattern,
            alpha_pattern=alpha_pattern,
            rank_stabilised=bool(settings.get("use_rslora")),
            dora=bool(settings.get("use_dora")),
            biases=settings.get("bias", "none") == "lora_only",
            base_model=str(base) if base else None,
            base_revision=str(revision) if revision else None,
        )

    def rank_of(self, path: str) -> int:
        """Returns the rank of the layer at a path in the adapter's own model."""
        return _of_pattern(self.rank_pattern, path, self.rank)

    def scale(self, path: str) -> float:
        """Returns what the layer's product is multiplied by (rank-stabilised: Kalajdzievski, 2023)."""
        rank = self.rank_of(path)
        return _of_pattern(self.alpha_pattern, path, self.alpha) / (math.sqrt(rank) if self.rank_stabilised else rank)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        settings = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise InvalidAdapter(f"{file.parent} has no {CONFIG}; is it the folder of an adapter?") from error
    except (ValueError, OSError) as error:
        raise InvalidAdapter(f"{file} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise InvalidAdapter(f"{file} is not a JSON object")
    return settings


def _of_pattern(pattern: Mapping[str, T], path: str, default: T) -> T:
    """Returns the value of the first key that is the end of the path, or a regular expression for it."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", path)), default)
