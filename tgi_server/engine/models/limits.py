"""How long a sequence a model was made for."""

import torch
from transformers import PretrainedConfig

UNBOUNDED_POSITIONS = 1 << 20
CPU_WARM_UP_TOKENS = 32

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
_UNBOUNDED = frozenset({"bloom", "mpt", "t5", "mt5", "umt5"})  # relative positions: any length is computable


def position_limit(config: PretrainedConfig) -> int | None:
    """The most positions the model has; None when its positions are relative and nothing bounds them."""
    config = config.get_text_config(decoder=True)
    if config.model_type in _UNBOUNDED or getattr(config, "alibi", False):
        return None
    for name in _NAMES:
        if value := getattr(config, name, None):
            return int(value)
    return None


def warm_up_tokens(config: PretrainedConfig, device: torch.device, max_prefill_tokens: int) -> int:
    """How long a prompt to run before the first request, so that what is free afterwards is free for good.

    On a CPU a short one does: memory is not fixed there, and only first-use work is to be got out of the way. There is
    always room for one more token after it.
    """
    tokens = max_prefill_tokens if device.type == "cuda" else min(max_prefill_tokens, CPU_WARM_UP_TOKENS)
    limit = position_limit(config)
    return min(tokens, limit - 1) if limit else tokens
