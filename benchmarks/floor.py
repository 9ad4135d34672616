"""The time that no server can beat on a machine: weights have to be read, and products have to be computed."""

from dataclasses import dataclass

from benchmarks.report import Summary
from benchmarks.workloads import Workload


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured speeds of the machine. bandwidth: bytes/s from memory; matrix_rate: FLOP/s of a large product."""

    bandwidth: float
    matrix_rate: float

    def describe(self) -> str:
        return f"{self.bandwidth / 1e9:.1f} GB/s from memory, {self.matrix_rate / 1e9:.0f} GFLOP/s in matrix products"


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Costs of a model's linear layers and of its attention. weight_bytes: read in every pass.

    layer_flops: of one token in all layers. head_flops: of one row of logits. kv_bytes: that a token leaves in the KV
    cache. attention_flops: of one query with one key, in all layers.
    """

    weight_bytes: int
    layer_flops: int
    head_flops: int
    kv_bytes: int = 0
    attention_flops: int = 0

    def prefill_seconds(self, machine: Machine, batch: int, context: int) -> float:
        """Returns the floor of computing `batch` prompts of `context` tokens in one pass."""
        return self._seconds(machine, 1, batch * context, batch, pairs=batch * context**2 / 2)

    def decode_seconds(self, machine: Machine, batch: int, context: int) -> float:
        """Returns the floor of a pass in which each of `batch` sequences with `context` tokens gets one more."""
        return self._seconds(machine, 1, batch, batch, cached=batch * context, pairs=batch * context)

    def workload_seconds(self, machine: Machine, workload: Workload, fresh_tokens: float) -> float:
        """Returns the floor of one lap of a workload, in which every user sends one prompt or has one chat.

        fresh_tokens: of a prompt, without those whose keys and values an earlier request has left.
        Passes that users share and prompts that ride along with other users' decoding are the best case.
        """
        replies = workload.users * workload.turns
        passes = workload.turns * workload.new_tokens
        tokens = replies * (fresh_tokens + workload.new_tokens - 1)
        return self._seconds(machine, passes, tokens, replies * workload.new_tokens)

    def _seconds(
        self, machine: Machine, passes: int, tokens: float, logits_rows: int, cached: float = 0, pairs: float = 0
    ) -> float:
        """cached: tokens whose keys and values are read. pairs: of a query and a key.

        Reading overlaps with products inside the linear layers and inside attention, but not between the two.
        """
        products = tokens * self.layer_flops + logits_rows * self.head_flops
        linear_layers = max(passes * self.weight_bytes / machine.bandwidth, products / machine.matrix_rate)
        attention_products = pairs * self.attention_flops / machine.matrix_rate
        return linear_layers + max(cached * self.kv_bytes / machine.bandwidth, attention_products)


def times_floor(summary: Summary, workload: Workload, cost: ModelCost, machine: Machine) -> float | None:
    """Returns the workload's time in multiples of the floor; None when the server did not count prompt tokens."""
    if not summary.requests or summary.prompt_tokens is None:
        return None
    fresh = fresh_tokens(workload, summary.prompt_tokens / summary.requests)
    floor = cost.workload_seconds(machine, workload, fresh) / (workload.users * workload.turns)
    return 1 / summary.requests_per_s / floor


def fresh_tokens(workload: Workload, prompt_tokens: float) -> float:
    """Returns the tokens of a prompt that a perfect prefix cache has not seen. prompt_tokens: of a prompt, on average.

    Of a prompt that all users send, only the last one is computed again. A chat's prompts hold all earlier messages
    and replies: at turn `t` of `turns` there are `t` messages and `t - 1` replies, of which one message is new.
    """
    if workload.words is None:
        return 1
    turns = workload.turns
    replies = workload.new_tokens * (turns - 1) / 2
    return (prompt_tokens - replies) / ((turns + 1) / 2)
