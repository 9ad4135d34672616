"""StarCoder2, which `transformers` computes."""

from typing import Any

from tgi_server.engine.models.spec import Family
from tgi_server.engine.models.splits import feed_forward, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan


def _plan(config: Any) -> ShardingPlan:
    return llama_plan(config, feed_forward("c_fc", down="c_proj"))


FAMILIES = {"starcoder2": Family(plan=_plan)}
