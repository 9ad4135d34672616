"""Reads an adapter's adapter_config.json, see https://huggingface.co/docs/peft/package_reference/lora."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic_core import SchemaError, SchemaValidator, core_schema

from tgi_server.engine.errors import InvalidAdapter

CONFIG = "adapter_config.json"
MAX_RANK = 256

T = TypeVar("T")

# Settings that are supported, and settings that do not matter to a trained adapter.
_HONOURED = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias", "lora_bias"}
_OF_TRAINING = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "fan_in_fan_out", "init_lora_weights", "eva_config", "loftq_config", "corda_config"),
    *("lora_ga_config", "megatron_config", "megatron_core", "ensure_weight_tying", "qalora_group_size"),
    *("runtime_config", "velora_config"),
}
# Initializations that do not change the base model's weights.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Limits of `rank_pattern` and `alpha_pattern`: number of keys, of regular expressions among them, and of characters of
# an expression.
_MAX_KEYS = 1000
_MAX_EXPRESSIONS = 20
_MAX_EXPRESSION_LENGTH = 100
# Keys without repetitions: matching them cannot backtrack.
_LAYER_NAME = re.compile(r"\^?[\w.]+")

# Returns the value for a layer by its path; None if no key matches.
ValueOf = Callable[[str], T | None]


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of a LoRA adapter that determine its outputs.

    rank, alpha: those of most layers. rank_pattern, alpha_pattern: return those of a layer that differs, else None.
    rank_stabilised: True if the scale is alpha / sqrt(rank) instead of alpha / rank. dora: True for DoRA. biases: True
    if the biases of adapted layers were trained, too, and replace the base model's.
    """

    rank: int
    alpha: float
    rank_pattern: ValueOf[int]
    alpha_pattern: ValueOf[float]
    rank_stabilised: bool
    dora: bool
    biases: bool

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Reads the folder's adapter_config.json. Raises InvalidAdapter, which names the setting."""
        file = folder / CONFIG
        settings = _read(file)
        kind = settings.get("peft_type")
        if kind != "LORA":
            raise InvalidAdapter(f"{file}: peft_type is {kind!r}; only LORA adapters are served")
        if modules := settings.get("modules_to_save"):
            raise InvalidAdapter(
                f"{file}: modules_to_save is {modules}: modules that replace those of the base model are not "
                "supported; merge the adapter with peft, and serve the merged model"
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
            return cls(
                rank=int(settings["r"]),
                alpha=float(settings.get("lora_alpha", 8)),
                rank_pattern=_pattern(settings, "rank_pattern", int),
                alpha_pattern=_pattern(settings, "alpha_pattern", float),
                rank_stabilised=bool(settings.get("use_rslora")),
                dora=bool(settings.get("use_dora")),
                biases=bias == "lora_only",
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidAdapter(f"{file} is not as peft writes it ({type(error).__name__}: {error})") from error

    def rank_of(self, path: str) -> int:
        """Returns the rank of the layer at a path in the adapter's own model."""
        found = self.rank_pattern(path)
        return self.rank if found is None else found

    def scale(self, path: str) -> float:
        """Returns the scale of the layer's LoRA delta (rank-stabilised: Kalajdzievski, 2023)."""
        rank, found = self.rank_of(path), self.alpha_pattern(path)
        alpha = self.alpha if found is None else found
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        settings = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise InvalidAdapter(f"{file.parent} has no {CONFIG}; is it the folder of an adapter?") from error
    except (ValueError, OSError, RecursionError) as error:
        raise InvalidAdapter(f"{file} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise InvalidAdapter(f"{file} is not a JSON object")
    return settings


def _pattern(settings: Mapping[str, Any], name: str, kind: Callable[[Any], T]) -> ValueOf[T]:
    """Returns a setting as a function from a layer's path to the value of the first key that matches.

    A key is the end of a path, or a regular expression for it. Raises ValueError for a key that is neither.
    """
    values: Mapping[str, Any] = settings.get(name) or {}
    if len(values) > _MAX_KEYS:
        raise ValueError(f"{name} has {len(values)} keys; it may have {_MAX_KEYS}")
    expressions = sum(_LAYER_NAME.fullmatch(key) is None for key in values)
    if expressions > _MAX_EXPRESSIONS:
        raise ValueError(
            f"{name} has {expressions} regular expressions; it may have {_MAX_EXPRESSIONS} beside the names of layers"
        )
    patterns = [(_matcher(name, key), kind(value)) for key, value in values.items()]
    return lambda path: next((value for matches, value in patterns if matches(path)), None)


def _matcher(name: str, key: str) -> Callable[[str], object]:
    """Compiles a key. Regular expressions use an engine that matches in linear time. Raises ValueError."""
    pattern = rf"^(?:.*\.)?(?:{key})$"
    if _LAYER_NAME.fullmatch(key):
        return re.compile(pattern).match
    fault = f"{name} has the regular expression {key[:_MAX_EXPRESSION_LENGTH]!r}"
    if len(key) > _MAX_EXPRESSION_LENGTH:
        raise ValueError(f"{fault}... of {len(key)} characters; it may have {_MAX_EXPRESSION_LENGTH}")
    if "{" in key:  # a counted repetition is compiled as many times as it counts
        raise ValueError(f"{fault}, which counts repetitions; use the names of layers")
    try:
        _compile(key)
        return _compile(pattern).isinstance_python
    except SchemaError as error:
        reason = str(error).strip().splitlines()[-1].removeprefix("error: ")
        raise ValueError(f"{fault}, which is not supported: {reason}; use the names of layers") from error


def _compile(pattern: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
