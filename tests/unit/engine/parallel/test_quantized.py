"""Quantised models over two shards: the tokens are those of the whole model with the same weights."""

from pathlib import Path

import pytest

from tests.quantized_models import LAYOUTS, make_quantized
from tests.tiny_models import make
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS
from tgi_server.engine.config import KV_CACHE_DTYPES
from tgi_server.engine.parallel import ShardGroup

TEXTS = prompts((1, 20, 5, 33))
FIRST = "gptq_act_order"


def tokens(group: ShardGroup | None, folder: Path, quantize: str | None = None) -> list[list[int]]:
    return generate_together(load_engine(folder, group=group, quantize=quantize), TEXTS)


@pytest.mark.parametrize(
    ("layout", "architecture"),
    [
        (FIRST, "llama"),
        *(
            pytest.param(layout, architecture, marks=pytest.mark.slow)
            for layout, architecture in [
                *((layout, "llama") for layout in LAYOUTS if layout not in (FIRST, "mxfp4")),
                ("gptq", "gpt2"),
                ("nf4", "gpt_neox"),
                ("w4a16", "phi3"),
                ("gptq", "mixtral"),
                ("awq", "opt"),
                ("w4a16_act_order", "mixtral"),
                ("fp8_blocks", "qwen3_moe"),
                ("mxfp4", "gpt_oss"),
                ("gptq", "bamba"),
                ("fp8_blocks", "qwen3_next"),
                ("awq", "lfm2"),
            ]
        ),
    ],
)
def test_two_shards_say_what_the_dense_model_says(layout, architecture, ranks_of: RanksOf, tmp_path) -> None:
    quantized, dense = make_quantized(layout, tmp_path, architecture)
    expected = tokens(None, dense)
    assert ranks_of(2).run(tokens, quantized) == [expected, expected]


def cached_in_8_bits(group: ShardGroup | None, folder: Path, name: str) -> list[list[int]]:
    return generate_together(load_engine(folder, group=group, kv_cache_dtype=name), TEXTS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in KV_CACHE_DTYPES])
def test_shards_cache_in_8_bits_what_the_whole_model_does(name, ranks_of: RanksOf, tmp_path) -> None:
    folder = make("llama", tmp_path)
    expected = cached_in_8_bits(None, folder, name)
    assert ranks_of(2).run(cached_in_8_bits, folder, name) == [expected, expected]


_ROUNDED = [
    *((name, "llama") for name in ROUNDINGS if name != "int8"),
    ("int4", "gpt_oss"),
    ("int4", "mixtral"),
    ("int4", "qwen3_next"),
]


@pytest.mark.parametrize(("name", "architecture"), [pytest.param(*each, marks=pytest.mark.slow) for each in _ROUNDED])
def test_shards_round_as_the_whole_model_does(name, architecture, ranks_of: RanksOf, tmp_path) -> None:
    folder = make(architecture, tmp_path)
    expected = tokens(None, folder, name)
    assert ranks_of(2).run(tokens, folder, name) == [expected, expected]
