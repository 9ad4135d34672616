"""The floor: the longer of reading the weights and computing the products."""

from dataclasses import replace

import pytest

from benchmarks.floor import Machine, ModelCost, fresh_tokens, times_floor
from benchmarks.load import MeasuredRequest, WorkloadResult
from benchmarks.report import summarise
from benchmarks.workloads import Workload

MACHINE = Machine(bandwidth=100.0, matrix_rate=1000.0)
COST = ModelCost(weight_bytes=50, layer_flops=8, head_flops=2)
PROMPTS = Workload("X", users=4, words=10, new_tokens=5, repeat=2)


@pytest.mark.parametrize(("batch", "seconds"), [(1, 0.5), (50, 0.5), (100, 1.0)])
def test_a_pass_takes_as_long_as_the_slower_of_memory_and_products(batch: int, seconds: float) -> None:
    assert COST.decode_seconds(MACHINE, batch, context=7) == pytest.approx(seconds)


def test_a_pass_reads_the_cache_and_computes_attention_too() -> None:
    cost = replace(COST, kv_bytes=3, attention_flops=4)
    assert cost.decode_seconds(MACHINE, batch=2, context=100) == pytest.approx((50 + 2 * 100 * 3) / 100)
    products = 2 * (10 * 8 + 2 + 4 * 10**2 / 2)
    assert cost.prefill_seconds(Machine(1e9, 1000.0), batch=2, context=10) == pytest.approx(products / 1000)


def test_linear_layers_bound_by_products_and_attention_bound_by_memory_follow_each_other() -> None:
    cost = replace(COST, kv_bytes=3, attention_flops=4)
    seconds = 200 * (8 + 2) / 1000 + 200 * 100 * 3 / 100
    assert cost.decode_seconds(MACHINE, batch=200, context=100) == pytest.approx(seconds)


def test_a_workload_bound_by_memory_reads_the_weights_once_for_each_new_token() -> None:
    assert COST.workload_seconds(MACHINE, PROMPTS, fresh_tokens=10) == pytest.approx(5 * 0.5)


def test_a_workload_bound_by_products_computes_every_token_once() -> None:
    many = replace(PROMPTS, users=1000)
    assert COST.workload_seconds(MACHINE, many, fresh_tokens=10) == pytest.approx(1000 * (14 * 8 + 5 * 2) / 1000)


def test_fresh_tokens_of_prompts_of_one_prompt_for_all_and_of_chats() -> None:
    assert fresh_tokens(PROMPTS, 12) == 12
    assert fresh_tokens(replace(PROMPTS, words=None), 9) == 1
    chat = replace(PROMPTS, turns=3)
    prompts = [12, 12 + 5 + 12, 12 + 5 + 12 + 5 + 12]
    assert fresh_tokens(chat, sum(prompts) / 3) == pytest.approx(12)


def test_a_server_at_the_floor_takes_the_floor_once() -> None:
    lap = COST.workload_seconds(MACHINE, PROMPTS, fresh_tokens=12)
    record = MeasuredRequest(latency=lap, first_token=None, gaps=[], new_tokens=5, prompt_tokens=12)
    outcome = WorkloadResult(PROMPTS, [record] * 8, seconds=2 * lap)
    assert times_floor(summarise(outcome), PROMPTS, COST, MACHINE) == pytest.approx(1)
    assert times_floor(summarise(replace(outcome, seconds=6 * lap)), PROMPTS, COST, MACHINE) == pytest.approx(3)


def test_no_floor_without_the_number_of_prompt_tokens() -> None:
    record = MeasuredRequest(latency=1, first_token=None, gaps=[], new_tokens=5, prompt_tokens=None)
    assert times_floor(summarise(WorkloadResult(PROMPTS, [record], seconds=1)), PROMPTS, COST, MACHINE) is None
