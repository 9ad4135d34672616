"""Granite and HyperCLOVA X: Llama's layers, with embeddings, residual branches and logits scaled by config.json."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, activation
from tgi_server.engine.models.splits import llama_plan


def granite(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(
        config,
        activation=activation(config.hidden_act),
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logits_divisor=config.logits_scaling,
    )


def hyperclovax(config: Any) -> DecoderSpec:
    """Its layers may have norms after attention and the feed-forward part; logits are multiplied, not divided."""
    layer = LayerSpec(attended_norm="post_norm1", fed_norm="post_norm2") if config.use_post_norm else LayerSpec()
    layers = (layer,) * config.num_hidden_layers
    return replace(granite(config), layers=layers, logits_divisor=1 / config.logits_scaling)


FAMILIES = {"granite": Family(granite, llama_plan), "hyperclovax": Family(hyperclovax, llama_plan)}
