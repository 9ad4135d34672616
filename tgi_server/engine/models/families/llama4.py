"""Llama 4, which `transformers` computes."""

from typing import Any

from tgi_server.engine.models.spec import Family
from tgi_server.engine.models.splits import LLAMA, heads_of
from tgi_server.engine.parallel.layers import SummedExperts
from tgi_server.engine.parallel.plan import ShardingPlan, Slice, Split
from tgi_server.engine.parallel.shares import halves


def _plan(config: Any) -> ShardingPlan:
    experts = Split({"gate_up_proj": Slice(2, halves), "down_proj": Slice(1)}, SummedExperts)
    return ShardingPlan(heads_of(config), ("self_attn",), {**LLAMA, "experts": experts}, ("router",))


FAMILIES = {"llama4_text": Family(plan=_plan, attention="llama4")}
