"""Every architecture that can be split, token for token equal to the whole model, in float32."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny_models import ARCHITECTURES, make
from tests.unit.engine.models.driver import generate_together, load_engine, prompts
from tests.unit.engine.sharding.ranks import Ranks
from tgi_server.engine.sharding import ShardGroup

UNSPLIT = {"llama4_text", "mamba", "qwen3_next", "rwkv"}
TEXTS = prompts((1, 70, 5, 33, 2, 17))

RanksOf = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[RanksOf]:
    """Started when they are first asked for."""
    started: dict[int, Ranks] = {}

    def ranks(count: int) -> Ranks:
        if count not in started:
            started[count] = Ranks(count)
        return started[count]

    yield ranks
    for each in started.values():
        each.__exit__()


def generate(group: ShardGroup, folder: Path, settings: dict[str, object]) -> tuple[list[list[int]], bool]:
    engine = load_engine(folder, group=group, **settings)
    return generate_together(engine, TEXTS), engine.info.paged


def check(ranks: Ranks, folder: Path, **settings: object) -> None:
    whole = load_engine(folder, **settings)
    expected = generate_together(whole, TEXTS)
    assert len({token for tokens in expected for token in tokens}) > 10, "a model that says nothing proves nothing"
    for outputs, paged in ranks.run(generate, folder, settings):
        assert outputs == expected
        assert paged is whole.info.paged


@pytest.mark.parametrize("architecture", ["falcon_40b", "gpt_neox", "llama"])
def test_two_shards_generate_what_the_whole_model_does(architecture: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    check(ranks_of(2), make(architecture, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - UNSPLIT))
def test_so_does_every_architecture(architecture: str, count: int, ranks_of: RanksOf, tmp_path: Path) -> None:
    check(ranks_of(count), make(architecture, tmp_path))
