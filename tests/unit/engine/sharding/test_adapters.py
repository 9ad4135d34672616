"""Adapters over two shards, each with its slices of their matrices."""

from pathlib import Path

import pytest

from tests.tiny_models import make
from tests.unit.engine.adapters.adapted import make_adapted
from tests.unit.engine.requests import Requests, load_engine, prompts
from tests.unit.engine.runners.test_parity import check_outputs, quick, run_overlapping
from tests.unit.engine.sharding.conftest import RanksOf
from tgi_server.engine.sharding import ShardGroup

ARCHITECTURES = [
    *("bart", "bloom", "cohere", "falcon_7b", "falcon_40b", "gemma2", "gpt2", "gpt_bigcode_multi_head", "gpt_neo"),
    *("gpt_neox", "gptj", "llama", "mixtral", "mpt", "olmo2", "opt", "phi3", "qwen2", "qwen3", "santacoder"),
    *("starcoder2", "t5"),
]


def run(group: ShardGroup, folder: Path, adapters: dict[str, Path], ids: list[str]) -> list[list[int]]:
    engine = load_engine(folder, group=group)
    for name, place in adapters.items():
        engine.adapters.put(name, engine.adapters.read(place))
    requests = Requests(engine, prompts(), adapters=ids)
    run_overlapping(requests)
    return requests.outputs


@pytest.mark.parametrize("architecture", quick(ARCHITECTURES, {"llama"}))
def test_requests_get_the_tokens_of_the_merged_models(architecture: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    model = make_adapted(make(architecture, tmp_path / "model"))
    first, second = ranks_of(2).run(run, model.folder, model.adapters, model.ids())
    assert first == second
    check_outputs(first, model.expected())
