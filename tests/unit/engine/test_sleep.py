"""A model that sleeps holds little memory, and computes the same bits when it is awake again."""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.adapters import make_adapter
from tests.tiny_encoders import make_embedder
from tests.tiny_models import build, make
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.requests import load_engine, prompts
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine import sleep as module
from tgi_server.engine.driver import Driver
from tgi_server.engine.encoders import Encoder
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.sleep import SleepingModel

TEXTS = prompts((1, 70, 5, 33))
INT4 = {"quantize": "int4", "dtype": torch.bfloat16}
MODELS = [("llama", INT4), ("gpt_oss", INT4), ("jamba", INT4), ("opt", {}), ("t5", {}), ("gemma3n_text", {})]
QUICK = ("llama", "jamba", "t5")


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of tiny models are small; so all that have a whole page are given up."""
    monkeypatch.setattr(module, "_LEAST", 4096)


def warm(engine: Engine) -> Engine:
    engine.warm_up(max_batch_size=4, max_prefill_tokens=256, max_total_tokens=128)
    return engine


def generate(engine: Engine, adapter: str = "") -> list[list[int]]:
    stopping = StoppingParameters(12, ignore_eos=True)
    sequences = [RunningSequence(number, text, stopping, adapter_id=adapter) for number, text in enumerate(TEXTS)]
    return [output.tokens for output in Driver(engine).run(*sequences)]


def nameless_bytes() -> int:
    """Returns the bytes of files without names that this process has open."""
    size = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the folder itself
            if os.readlink(link).endswith(" (deleted)"):
                size += link.stat().st_size
    return size


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [pytest.param(*each, marks=[] if each[0] in QUICK else pytest.mark.slow) for each in MODELS],
)
def test_it_computes_the_same_after_each_sleep(architecture: str, settings, tmp_path: Path) -> None:
    engine = warm(load_engine(make(architecture, tmp_path / "model"), **settings))
    expected = generate(engine)
    assert len({token for tokens in expected for token in tokens}) > 5, "a model that says nothing proves nothing"
    model = SleepingModel(engine, (), tmp_path / "weights")
    for _ in range(3):
        engine.clear()
        assert model.sleep() > 0
        assert model.sleep() == 0
        assert model.asleep
        with pytest.raises(InvalidCall, match="warm up"):
            generate(engine)
        model.wake()
        model.wake()
        assert generate(engine) == expected
    assert list((tmp_path / "weights").iterdir()) == []


def test_weights_of_a_later_start_are_read_from_its_file(tmp_path: Path) -> None:
    folder, cache = make("llama", tmp_path / "model", hidden_size=256, intermediate_size=1024), tmp_path / "packed"
    settings = {"packed_cache": cache, **INT4}
    sizes = []
    for _ in range(2):
        engine = warm(load_engine(folder, **settings))
        expected, before = generate(engine), nameless_bytes()
        model = SleepingModel(engine, (), cache)
        engine.clear()
        model.sleep()
        sizes.append(nameless_bytes() - before)
        model.wake()
        assert generate(engine) == expected
    assert sizes[1] < sizes[0] / 4


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[SleepingModel, Engine, Path]]:
    """A model of a later start, and the file with its packed weights."""
    folder, cache = make("llama", tmp_path / "model", hidden_size=256, intermediate_size=1024), tmp_path / "packed"
    load_engine(folder, packed_cache=cache, **INT4)
    engine = warm(load_engine(folder, packed_cache=cache, **INT4))
    (file,) = (cache / "oatmill-packed-weights").iterdir()
    return SleepingModel(engine, (), cache), engine, file


def test_a_file_that_is_changed_meanwhile_is_refused(stored: tuple[SleepingModel, Engine, Path]) -> None:
    model, _, file = stored
    model.sleep()
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"x")
    os.utime(file)
    with pytest.raises(OSError, match="was changed while the model slept"):
        model.wake()
    assert model.asleep


def test_a_file_that_is_changed_while_it_is_awake_is_used_no_more(stored: tuple[SleepingModel, Engine, Path]) -> None:
    model, engine, file = stored
    expected = generate(engine)
    engine.clear()
    model.sleep()
    model.wake()
    os.utime(file)
    model.sleep()
    model.wake()
    assert generate(engine) == expected


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_file_that_is_deleted_is_not_missed(stored: tuple[SleepingModel, Engine, Path], when: str) -> None:
    model, engine, file = stored
    expected = generate(engine)
    engine.clear()
    if when == "before":
        file.unlink()
    model.sleep()
    if when == "meanwhile":
        file.unlink()
    model.wake()
    assert generate(engine) == expected


def test_a_model_that_cannot_sleep_says_why_and_goes_on(tmp_path: Path) -> None:
    engine = warm(load_engine(make("llama", tmp_path / "model")))
    with pytest.raises(InvalidCall, match="--packed-weights-cache is none"):
        SleepingModel(engine, (), None).sleep()
    model = SleepingModel(engine, (), tmp_path / "weights")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(InvalidCall, match=r"cannot take its weights: .*File too large"):
            model.sleep()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    driver = Driver(engine)
    driver.add(RunningSequence(0, TEXTS[1], StoppingParameters(12, ignore_eos=True)))
    driver.step()
    with pytest.raises(InvalidCall, match="while sequences run"):
        model.sleep()
    driver.run()
    assert generate(engine)


def test_adapters_stay_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = build("llama")
    base.save_pretrained(tmp_path / "model")
    adapter, _ = make_adapter(base, tmp_path / "adapter", r=4, target_modules=["q_proj", "down_proj"])
    engine = warm(load_engine(tmp_path / "model"))
    engine.adapters.put("a", engine.adapters.fetch("a", adapter))
    plain, adapted = generate(engine), generate(engine, "a")
    assert plain != adapted
    model = SleepingModel(engine, (), tmp_path / "weights")
    engine.clear()
    model.sleep()
    model.wake()
    assert [generate(engine), generate(engine, "a")] == [plain, adapted]


def test_a_draft_model_sleeps_too(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    engine = warm(load_engine(folder, speculate=3, speculative_model=folder))
    expected = generate(engine)
    model = SleepingModel(engine, (), tmp_path / "weights")
    for _ in range(2):
        engine.clear()
        model.sleep()
        model.wake()
        assert generate(engine) == expected


def test_encoders_sleep_too(tmp_path: Path) -> None:
    encoder = Encoder("embed", EngineConfig(make_embedder("bert", tmp_path / "model")))
    texts = [type("Text", (), {"ids": text, "second": 0}) for text in ([3, 4, 5], [6, 7])]
    expected = encoder.encode(texts)
    model = SleepingModel(None, [encoder], tmp_path / "weights")
    for _ in range(2):
        assert model.sleep() >= 0
        model.wake()
        assert torch.equal(encoder.encode(texts), expected)


@pytest.mark.slow
def test_two_shards_sleep(ranks_of: RanksOf, tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    for before, after in ranks_of(2).run(_sleeping_shard, folder, tmp_path / "weights"):
        assert before == after


def _sleeping_shard(group: ShardGroup, folder: Path, weights: Path) -> tuple[list[list[int]], list[list[int]]]:
    engine = warm(load_engine(folder, group=group, **INT4))
    before = generate(engine)
    engine.clear()
    model = SleepingModel(engine, (), weights)
    model.sleep()
    model.wake()
    return before, generate(engine)
