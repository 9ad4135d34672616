"""StarCoder2: Llama's attention, layer norms, and a feed-forward part without a gate."""

from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, activation
from tgi_server.engine.models.splits import feed_forward, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan


def starcoder2(config: Any) -> DecoderSpec:
    layer = LayerSpec(up=("mlp.c_fc",), down="mlp.c_proj")
    return DecoderSpec.uniform(config, layer, activation=activation(config.hidden_act), gated_mlp=False)


def _plan(config: Any) -> ShardingPlan:
    return llama_plan(config, feed_forward("c_fc", down="c_proj"))


FAMILIES = {"starcoder2": Family(starcoder2, _plan)}
