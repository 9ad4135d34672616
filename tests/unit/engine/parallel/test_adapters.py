"""Adapters over two shards, each with its slices of their matrices."""

from pathlib import Path
from typing import Any

import pytest

from tests.quantized_models import make_quantized
from tests.tiny_models import HYBRIDS, make
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.lora.adapted import make_adapted
from tests.unit.engine.requests import Requests, load_engine, prompts
from tests.unit.engine.runners.test_parity import check_outputs, quick, run_overlapping
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.speculation.costs import StepCosts

ARCHITECTURES = [
    *("bart", "bloom", "cohere", "falcon_7b", "falcon_40b", "gemma2", "gpt2", "gpt_bigcode_multi_head", "gpt_neo"),
    *("gpt_neox", "gptj", "llama", "mixtral", "mpt", "olmo2", "opt", "phi3", "qwen2", "qwen3", "santacoder"),
    *("starcoder2", "t5"),
    *sorted(HYBRIDS - {"lfm2_vl", "olmo_hybrid"}),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma3n_text", "gemma4_text", "glm4_moe", "glm4_moe_lite"),
    *("glm_moe_dsa", "gpt_oss", "granite", "llama4_text", "minicpm3", "qwen3_moe", "smollm3", "youtu"),
]


def run(
    group: ShardGroup, folder: Path, adapters: dict[str, Path], ids: list[str], settings: dict[str, Any] | None = None
) -> list[list[int]]:
    engine = load_engine(folder, group=group, **(settings or {}))
    for name, place in adapters.items():
        engine.adapters.put(name, engine.adapters.read(place))
    requests = Requests(engine, prompts(), adapters=ids)
    if engine.speculation is not None:
        engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    run_overlapping(requests)
    return requests.outputs


@pytest.mark.parametrize("architecture", quick(ARCHITECTURES, {"llama"}))
def test_requests_get_the_tokens_of_the_merged_models(architecture: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    model = make_adapted(make(architecture, tmp_path / "model"))
    first, second = ranks_of(2).run(run, model.folder, model.adapters, model.ids())
    assert first == second
    check_outputs(first, model.expected())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["gptq_act_order", "awq", "nf4", "fp8_blocks"])
def test_base_models_that_are_quantised(layout: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    quantized, dense = make_quantized(layout, tmp_path)
    model = make_adapted(dense)
    first, second = ranks_of(2).run(run, quantized, model.adapters, model.ids())
    assert first == second
    check_outputs(first, model.expected())


@pytest.mark.slow
@pytest.mark.parametrize("drafting", [False, True])
def test_drafts(drafting: bool, ranks_of: RanksOf, tmp_path: Path) -> None:
    """Of n-grams, and of the model itself without its adapters."""
    model = make_adapted(make("llama", tmp_path / "model"))
    settings = {"speculate": 3, "speculative_model": model.folder if drafting else None}
    first, second = ranks_of(2).run(run, model.folder, model.adapters, model.ids(), settings)
    assert first == second
    check_outputs(first, model.expected())
