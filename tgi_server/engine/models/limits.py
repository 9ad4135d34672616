"""How long a sequence a model was made for."""

from transformers import PretrainedConfig

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
_UNBOUNDED = frozenset({"bloom", "mpt", "t5", "mt5", "umt5"})  # relative positions: any length is computable


def position_limit(config: PretrainedConfig) -> int | None:
    """The most positions the model has; None when its positions are relative and nothing bounds them."""
    if config.model_type in _UNBOUNDED or getattr(config, "alibi", False):
        return None
    for name in _NAMES:
        if value := getattr(config, name, None):
            return int(value)
    return None
