"""Phi-3: Llama's layers, with the projections joined in the checkpoint."""

from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, activation
from tgi_server.engine.models.splits import head_counts, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan, column_parallel
from tgi_server.engine.parallel.shares import halves, queries_keys_values

_LAYER = LayerSpec(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))


def phi3(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(config, _LAYER, activation=activation(config.hidden_act))


def _plan(config: Any) -> ShardingPlan:
    splits = {
        "self_attn": head_counts(of_keys=("num_key_value_heads",)),
        "self_attn.qkv_proj": column_parallel(queries_keys_values),
        "gate_up_proj": column_parallel(halves),
    }
    return llama_plan(config, splits)


FAMILIES = {"phi3": Family(phi3, _plan)}
