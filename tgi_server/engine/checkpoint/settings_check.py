"""Finds impossible settings in a config.json that `transformers` does not check."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from tgi_server.engine.errors import UnsupportedModel

_ROPES = ("rope_parameters", "rope_scaling")
_NUMBERS = ("rope_theta", "partial_rotary_factor", "rotary_pct")
# Settings of rotary embeddings that are texts.
_TEXTS = {"rope_type", "type", "finetuned"}


def check_rotary_settings(file: Path, content: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel if a setting of the rotary embeddings is not the number that it has to be.

    content: that of a config.json, where models of several parts have objects for these.
    """
    for name, value in _rotary_settings(content, ""):
        wrong = not isinstance(value, int | float) or not math.isfinite(value)
        if wrong or (name.endswith(".factor") and value <= 0):
            needed = "a number" if wrong else "a number above 0"
            raise UnsupportedModel(f"{file} cannot be used: {name} is {value!r}; {needed} is needed")


def check_padding(file: Path, config: PretrainedConfig) -> None:
    """Raises UnsupportedModel if the token that pads batches is beyond the vocabulary. config: of the text model."""
    token, size = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(token, int) and isinstance(size, int) and token >= size:
        raise UnsupportedModel(
            f"{file} cannot be used: pad_token_id is {token}; it must be less than vocab_size, which is {size}"
        )


def _rotary_settings(content: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of settings that have to be numbers."""
    for name, value in content.items():
        if name in _ROPES and isinstance(value, dict):
            yield from _of_rope(value, f"{before}{name}")
        elif name in _NUMBERS and value is not None:
            yield f"{before}{name}", value
        elif name.endswith("_config") and isinstance(value, dict):
            yield from _rotary_settings(value, f"{before}{name}.")


def _of_rope(rope: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    scales = rope.get("rope_type", rope.get("type", "default")) != "default"
    for name, value in rope.items():
        if isinstance(value, dict):  # of one kind of layers
            yield from _of_rope(value, f"{before}.{name}")
        elif isinstance(value, list):
            yield from ((f"{before}.{name}[{index}]", item) for index, item in enumerate(value))
        elif name not in _TEXTS and (value is not None or (scales and name == "factor")):
            yield f"{before}.{name}", value
