"""Granite: Llama's layers, with what enters, what layers add and what leaves multiplied by numbers of config.json."""

from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, activation
from tgi_server.engine.models.splits import llama_plan


def granite(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(
        config,
        activation=activation(config.hidden_act),
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logits_divisor=config.logits_scaling,
    )


FAMILIES = {"granite": Family(granite, llama_plan)}
