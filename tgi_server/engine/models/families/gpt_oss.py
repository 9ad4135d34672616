"""gpt-oss: a mixture of experts with a gate of its own, and attention with sinks and windows."""

from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, MixtureSpec, RopeSpec
from tgi_server.engine.models.splits import llama_plan
from tgi_server.engine.parallel.layers import RowParallel
from tgi_server.engine.parallel.plan import FIRST_ONLY, ShardingPlan, Slice, Split
from tgi_server.engine.parallel.shares import pairs, parts, query_heads


def gpt_oss(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(config, LayerSpec(mixture=MixtureSpec(router="router")), ropes=(RopeSpec(table="half"),))


def _plan(config: Any) -> ShardingPlan:
    experts = {
        "gate_up_proj": Slice(2, pairs),
        "gate_up_proj_bias": Slice(1, pairs),
        "down_proj": Slice(1, parts),
        "down_proj_bias": FIRST_ONLY,
    }
    splits = {"experts": Split(experts, RowParallel), "self_attn": Split({"sinks": Slice(0, query_heads)})}
    return llama_plan(config, splits, whole=("router",))


FAMILIES = {"gpt_oss": Family(gpt_oss, _plan)}
