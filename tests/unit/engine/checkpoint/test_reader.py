"""A shard has its part of the model in memory, and never more than that."""

from pathlib import Path

import pytest

from tests.tiny_models import make
from tests.unit.engine.own_memory import Peak, own_bytes
from tests.unit.engine.ranks import Ranks
from tests.unit.engine.requests import load_engine
from tgi_server.engine.parallel import ShardGroup

SETTINGS = {"vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
MARGIN = 1.1


def peak_of_loading(group: ShardGroup, folder: Path, small: Path) -> int:
    """Bytes that loading adds; what any model brings along is there already, from a small one.

    Trials of kernels, which take the same memory whatever the model is, are left out.
    """
    load_engine(small, group=group)
    before, peak = own_bytes(), Peak()
    with peak.watching():
        engine = load_engine(folder, group=group, linear_kernels="fma")
    assert engine.info.paged
    return peak.bytes - before


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_shard_takes_its_part_of_the_memory(count: int, tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "large", **SETTINGS, **HEADS)
    small = make("llama", tmp_path / "small")
    size = (folder / "model.safetensors").stat().st_size
    assert size > 200_000_000
    with Ranks(count) as ranks:
        for peak in ranks.run(peak_of_loading, folder, small):
            assert peak < MARGIN * size / count
