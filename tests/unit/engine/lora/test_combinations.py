"""Adapters beside all else that requests and servers may want: the tokens are those of the merged models."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.quantized_models import LAYOUTS, make_quantized
from tests.tiny_models import TOKENIZER_VOCAB_SIZE, make, make_tokenizer
from tests.unit.engine.lora.adapted import AdaptedModel, make_adapted
from tests.unit.engine.request_kinds import compare, of_every_kind, run_overlapping
from tests.unit.engine.requests import Requests, generated, load_engine, prompts
from tests.unit.engine.runners.test_parity import quick
from tgi_server.engine import Engine
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS
from tgi_server.engine.config import KV_CACHE_DTYPES
from tgi_server.engine.driver import Driver, Output
from tgi_server.engine.speculation.costs import StepCosts
from tgi_server.engine.speculation.drafters import NgramDrafter

TEXTS = prompts((1, 20, 5, 33))
PROMPTS = [[1, 40, 77, 300, 40, 77], [1, *range(50, 90), *range(50, 60)]]
LENGTHS = (30, 21)


def _tokens(engine: Engine, ids: Sequence[str]) -> list[list[int]]:
    requests = Requests(engine, TEXTS, adapters=ids)
    for index in range(len(TEXTS)):
        requests.join(index)
        requests.step()
    return requests.finish()


def _check(engine: Engine, model: AdaptedModel, ids: Sequence[str] = ("a0", "a1", "", "a1")) -> None:
    """Checks that requests with these adapters get the tokens of the merged models."""
    model.load(engine)
    expected = [generated(model.merged[each], text) for each, text in zip(ids, TEXTS, strict=True)]
    assert len({token for tokens in expected for token in tokens}) > 10, "a model that says nothing proves nothing"
    assert _tokens(engine, ids) == expected


@pytest.mark.parametrize("layout", quick((each for each in LAYOUTS if each != "mxfp4"), {"gptq_act_order"}))
def test_base_models_that_are_quantised(layout: str, tmp_path: Path) -> None:
    quantized, dense = make_quantized(layout, tmp_path)
    _check(load_engine(quantized), make_adapted(dense, count=2))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "architecture"), [("gptq", "gpt2"), ("awq", "phi3"), ("mxfp4", "gpt_oss")])
def test_base_models_of_other_architectures_that_are_quantised(layout: str, architecture: str, tmp_path: Path) -> None:
    quantized, dense = make_quantized(layout, tmp_path, architecture)
    _check(load_engine(quantized), make_adapted(dense, count=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "custom_kernels"), [*((name, False) for name in ROUNDINGS), ("int4", True), ("bitsandbytes-nf4", True)]
)
def test_base_models_that_are_rounded_as_they_are_read(name: str, custom_kernels: bool, tmp_path: Path) -> None:
    """Kernels of 8-bit weights round their inputs, too. DoRA's magnitudes go with the weights as they are stored."""
    folder, dense = (make("llama", tmp_path / each) for each in ("model", "dense"))
    weights = load_file(folder / "model.safetensors")
    rounded = {
        key: ROUNDINGS[name][1](weight).dense() if key.endswith("_proj.weight") else weight
        for key, weight in weights.items()
    }
    save_file(rounded, dense / "model.safetensors", {"format": "pt"})
    model = make_adapted(dense, count=3)
    _check(load_engine(folder, quantize=name, custom_kernels=custom_kernels), model, ("a0", "a2", "", "a2"))


@pytest.mark.slow
@pytest.mark.parametrize("custom_kernels", [True, False])
@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_a_cache_in_8_bits(name: str, custom_kernels: bool, tmp_path: Path) -> None:
    model = make_adapted(make("llama", tmp_path / "model"), count=2)
    settings: dict[str, Any] = {"kv_cache_dtype": name, "custom_kernels": custom_kernels}
    engine, ids = load_engine(model.folder, **settings), ("a0", "a1", "", "a1")
    model.load(engine)
    merged = {}
    for each in set(ids):
        model.merged[each].save_pretrained(tmp_path / f"merged {each}")
        merged[each] = _tokens(load_engine(tmp_path / f"merged {each}", **settings), [""] * len(TEXTS))
    assert _tokens(engine, ids) == [merged[each][index] for index, each in enumerate(ids)]


class Kinds:
    """A model whose requests may have grammars, and what its merged models make of requests of every kind."""

    def __init__(self, folder: Path) -> None:
        make("llama", folder, vocab_size=TOKENIZER_VOCAB_SIZE, max_position_embeddings=512)
        self.model = make_adapted(folder, count=4)
        self._expected: dict[str, dict[int, Output]] = {}
        for adapter_id, merged in self.model.merged.items():
            place = folder.with_name(f"merged {adapter_id}")
            merged.save_pretrained(place)
            shutil.copy(folder / "generation_config.json", place)  # peft's model has none that ends a reply
            for each in (place, folder):
                make_tokenizer().save(str(each / "tokenizer.json"))

    def run(self, engine: Engine, ids: Sequence[str]) -> tuple[dict[int, Output], Driver]:
        """Runs requests that have these adapters in turn, some of which are preempted."""
        engine.warm_up(max_batch_size=64, max_prefill_tokens=4096, max_total_tokens=256)
        if engine.speculation is not None:
            engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
        self.model.load(engine, *{*ids} - {""})
        driver = Driver(engine, grow=True)
        sequences = of_every_kind(PROMPTS, LENGTHS)
        for index, sequence in enumerate(sequences):
            sequence.adapter_id = ids[index % len(ids)]
        return run_overlapping(driver, sequences, preempted=3), driver

    def expected(self, ids: Sequence[str]) -> Mapping[int, Output]:
        """Returns what the merged models make of the same requests."""
        for each in {*ids} - self._expected.keys():
            driver = Driver(self._merged(each))
            self._expected[each] = run_overlapping(driver, of_every_kind(PROMPTS, LENGTHS))
        first = self._expected[ids[0]]
        return {index: self._expected[ids[place % len(ids)]][index] for place, index in enumerate(first)}

    def _merged(self, adapter_id: str) -> Engine:
        engine = load_engine(self.model.folder.with_name(f"merged {adapter_id}"))
        engine.warm_up(max_batch_size=64, max_prefill_tokens=4096, max_total_tokens=256)
        return engine


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return Kinds(tmp_path_factory.mktemp("kinds") / "model")


FEW, ALL = ("a3", "", "a1"), ("a0", "a1", "", "a2", "a3")


@pytest.mark.parametrize(
    ("ids", "settings"),
    [
        (FEW, {"speculate": 4}),
        *(
            pytest.param(ALL, settings, marks=pytest.mark.slow)
            for settings in ({}, {"custom_kernels": False}, {"speculate": 4}, {"speculate": 4, "custom_kernels": False})
        ),
    ],
)
def test_requests_of_every_kind(kinds: Kinds, ids: Sequence[str], settings: dict[str, Any]) -> None:
    """Grammars, seeds, penalties, watermarks, log-probabilities and likely tokens; with drafts and preemptions."""
    engine = load_engine(kinds.model.folder, **settings)
    if engine.speculation is not None:
        engine.speculation.drafters = [NgramDrafter()]
    outputs, driver = kinds.run(engine, ids)
    compare(outputs, kinds.expected(ids))
    assert (driver.accepted > 0) is (engine.speculation is not None)
