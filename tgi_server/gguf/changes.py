"""The differences between tensors of GGUF files and those of `transformers`.

They are functions of a configuration of `transformers` and the name of a tensor in its layer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_server.gguf.configuration import Config

Order = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between a file's tensor and that of `transformers`.

    rows, columns: for each row or input in `transformers`, its index in the file; None: the same. of_numbers: converts
    numbers of the file, in float32. shape: converts the file's shape. beside: the name of a tensor whose rows follow
    those of this one, before `rows` orders all of them.
    """

    rows: Order | None = None
    columns: Order | None = None
    of_numbers: Callable[[Any], Any] | None = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    beside: str | None = None


SAME = Change()


def none(_: Config, __: str) -> Change:
    return SAME


def interleaved(config: Config, part: str) -> Change:
    """Reorders rows of queries and keys, which files have in the order of a rotary embedding of neighbouring pairs."""
    if part not in ("attn_q", "attn_k"):
        return SAME
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    if part == "attn_k":
        heads = config.get("num_key_value_heads") or heads
    return Change(np.arange(heads * size).reshape(heads, -1, 2).swapaxes(1, 2).ravel())


def short_convolution(_: Config, part: str) -> Change:
    return Change(shape=_with_channel) if part == "shortconv.conv" else SAME


def delta_rule(config: Config, part: str) -> Change:
    """Changes the tensors of a gated delta rule, and the order of its value heads."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    value_size, queries_and_keys = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]

    def order(size: int, before: int = 0) -> Order | None:
        """Files have the first value head of each key head first, then the second ones, and so on.

        size: rows or inputs of a head. before: rows that stand before those, in order.
        """
        if keys == values:
            return None
        order = np.arange(values * size).reshape(values // keys, keys, size).swapaxes(0, 1).ravel()
        return np.concatenate([np.arange(before), before + order])

    match part:
        case "ssm_a" | "ssm_dt" | "ssm_alpha" | "ssm_beta":
            return Change(order(1), of_numbers=_logarithm if part == "ssm_a" else None)
        case "ssm_conv1d":
            return Change(order(value_size, queries_and_keys), shape=_with_channel)
        case "attn_qkv":
            return Change(order(value_size, queries_and_keys))
        case "attn_gate":
            return Change(order(value_size))
        case "ssm_out":
            return Change(columns=order(value_size))
    return SAME


def qwen3_next(config: Config, part: str) -> Change:
    if part != "attn_qkv":
        return mamba1(config, part)  # decay and convolution are stored alike
    # Of each key head: its query, its key, its values and what gates these.
    heads, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    starts = np.cumsum([0, heads * size, heads * size, values, values])
    parts = [np.arange(first, last).reshape(heads, -1) for first, last in pairwise(starts)]
    return Change(np.concatenate(parts, 1).ravel(), beside="attn_gate")


def mamba1(_: Config, part: str) -> Change:
    match part:
        case "ssm_a":
            return Change(of_numbers=_logarithm)
        case "ssm_conv1d":
            return Change(shape=_with_channel)
    return SAME


def mamba2(_: Config, part: str) -> Change:
    """Changes shapes: vectors with a number for each head or group are matrices in files."""
    match part:
        case "ssm_a":
            return Change(of_numbers=_logarithm, shape=_flat)
        case "ssm_d" | "ssm_norm":
            return Change(shape=_flat)
        case "ssm_conv1d":
            return Change(shape=_with_channel)
    return SAME


def granite_hybrid(config: Config, part: str) -> Change:
    if part in ("ffn_gate", "ffn_gate_shexp"):
        return Change(beside=part.replace("gate", "up"))
    change = mamba2(config, part)
    return interleaved(config, part) if change is SAME else change


def nemotron_h(config: Config, part: str) -> Change:
    change = mamba2(config, part)
    return interleaved(config, part) if change is SAME else change


def _logarithm(numbers: Any) -> Any:
    """Returns a decay as `transformers` stores it; files have its -exp."""
    return np.log(-numbers)


def _with_channel(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a convolution of each channel by itself, [channels, 1, width]; that of its bias stays."""
    return (shape[0], 1, shape[1]) if len(shape) > 1 else shape


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (math.prod(shape),)
