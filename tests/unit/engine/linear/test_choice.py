"""The choice of kernels: by the table in the repository, by name, and from trials, real ones and made-up ones."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.kernels import equal_bits, kinds_of_weights
from tests.unit.engine.checkpoint.test_reader import own_bytes
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.kernels import build, load_kernels
from tgi_server.engine.linear import choice, linear_factory, trials
from tgi_server.engine.linear.choice import Weights
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.linear.kernel_table import KernelTable


def times(**by_kernel: list[float]) -> dict[str, dict[int, float]]:
    """Returns times at 1, 16 and 64 rows."""
    return {name: dict(zip((1, 16, 64), seconds, strict=True)) for name, seconds in by_kernel.items()}


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        (times(fma=[1, 2, 3]), "fma"),
        (times(bf16=[1, 9, 30], fma=[1, 15, 60], amx=[3, 4, 5]), "bf16,amx@16"),
        (times(bf16=[1, 9, 30], fma=[1, 15, 60], amx=[3, 10, 5]), "bf16,amx@64"),
        (times(bf16=[1, 9, 30], amx=[3, 9.5, 5]), "bf16,amx@16"),  # 16 by noise, so as many do
        (times(bf16=[1, 9, 30], amx=[0.98, 8.8, 29]), "bf16"),  # no more than noise
        (times(bf16=[2, 2, 2], fma=[1, 3, 3]), "fma,bf16@16"),
    ],
)
def test_each_number_of_rows_gets_its_fastest_kernel(measured, chosen) -> None:
    assert str(trials.choose(measured)) == chosen


def test_inputs_of_32_bits_are_not_rounded() -> None:
    assert load_kernels()
    assert "w4a16" in Weights.quantized("int4", torch.bfloat16).kernels
    for kind in ("int4", "codebook", "int6", "int8", "fp8"):
        weights = Weights.quantized(kind, torch.float32)
        assert weights.kernels == ("fma",)
        assert str(choice.choose_kernels(weights)) == "fma"
    assert "w4a16" not in Weights.quantized("codebook", torch.float16).kernels  # to 14 with a codebook


ALL_WEIGHTS = {f"{weights.kind} {weights.dtype}": weights for each in kinds_of_weights().values() for weights in each}


@pytest.mark.parametrize("name", ALL_WEIGHTS)
def test_kernels_of_one_table_give_the_same_bits(name: str) -> None:
    """Those of the section of this CPU, of the rules, and of sections of other CPUs with kernels that this one has."""
    weights, sections = ALL_WEIGHTS[name], choice.tables().values()
    named = [section.get(weights.kind, {}).get(str(weights.dtype).removeprefix("torch."), []) for section in sections]
    texts = {text for each in named for text in ([each] if isinstance(each, str) else each)}
    chosen = choice.choose_kernels(weights)
    known = [table for table in map(KernelTable.of, sorted(texts)) if set(table.kernels) <= set(weights.kernels)]
    assert chosen in known
    for table in known:
        assert equal_bits(weights, *table.kernels), str(table)


def test_a_cpu_without_a_section_goes_by_the_rules(monkeypatch, tmp_path) -> None:
    weights = Weights.plain(torch.bfloat16)
    file = tmp_path / "kernels.toml"
    monkeypatch.setattr(choice, "TABLE", file)
    rules = '[rules.dense]\nbfloat16 = ["magic", "fma,magic@4", "fma,fma_dequant@8"]\n'
    for section, expected in (
        ("", "fma,fma_dequant@8"),
        ('bfloat16 = "fma"', "fma"),
        ('bfloat16 = "magic"', "fma,fma_dequant@8"),
    ):
        file.write_text(f"{rules}[{torch.ops.oatmill.isa()}.dense]\n{section}\n")
        assert str(choice.choose_kernels(weights)) == expected
    file.write_text("")
    assert choice.choose_kernels(weights).kernels == weights.kernels[:1]


@pytest.mark.parametrize("text", ["fma", "bf16,amx@16"])
def test_a_table_is_read_as_it_is_written(text) -> None:
    assert str(KernelTable.of(text)) == text


@pytest.mark.parametrize("text", ["", "fma@2", "fma,amx@1", "fma,amx@x", "amx,fma@32,amx@16", "f ma"])
def test_text_that_is_no_table_is_refused(text) -> None:
    with pytest.raises(ValueError, match=r"kernel|rows"):
        KernelTable.of(text)


class Model(nn.Module):
    """Linear layers that are large enough to be measured."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 8192, dtype=dtype)
        self.down = nn.Linear(8192, 1024, bias=False, dtype=dtype)
        self.wide = nn.Linear(1024, 3072, dtype=dtype)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> None:
    assert load_kernels()
    monkeypatch.setattr(build, "CACHE", tmp_path)


def float_weights(dtype: torch.dtype) -> Weights:
    return Weights.plain(dtype)


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(float_weights, marks=pytest.mark.slow),
        pytest.param(lambda dtype: Weights.quantized("int8", dtype), marks=pytest.mark.slow),
        lambda dtype: Weights.quantized("int4", dtype),
        pytest.param(lambda dtype: Weights.quantized("fp8", dtype), marks=pytest.mark.slow),
    ],
)
def test_a_model_is_measured_once_on_a_machine_and_the_log_says_it(cache, caplog, monkeypatch, weights) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(trials, "_SMALL_BYTES", 8 << 20)
    monkeypatch.setattr(trials, "_QUIET_SECONDS", 60)
    shapes, kind = choice.plain_shapes(Model(torch.bfloat16)), weights(torch.bfloat16)
    first = trials.fastest(shapes, kind)
    assert f"linear layers: {first}, measured in" in caplog.text
    assert trials.fastest(shapes, kind) == first
    assert f"linear layers: {first}, as measured on this machine before" in caplog.text
    assert set(first.kernels) <= {*kind.kernels}


def test_what_is_measured_on_busy_cores_is_not_kept(cache, caplog, monkeypatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(trials, "_SMALL_BYTES", 8 << 20)
    monkeypatch.setattr(trials, "_QUIET_SECONDS", 0)
    for _ in range(2):
        trials.fastest(choice.plain_shapes(Model(torch.float32)), float_weights(torch.float32))
    assert caplog.text.count("so the next start measures again") == 2


def own_threads() -> int:
    now: int = torch.ops.oatmill.set_own_threads(0)
    torch.ops.oatmill.set_own_threads(now)
    return now


def test_trials_run_on_threads_that_busy_cores_do_not_hold_up(cache) -> None:
    plain, own = float_weights(torch.float32), []

    def make(*arguments) -> FloatLinear:
        layer = plain.make(*arguments)
        layer.register_forward_pre_hook(lambda *_: own.append(own_threads()))
        return layer

    before = torch.ops.oatmill.set_own_threads(0)
    trials.measure({64: 96}, {"fma": (replace(plain, make=make), "fma")}, (1, 4))
    assert own
    assert all(own)
    assert torch.ops.oatmill.set_own_threads(before) == 0


def test_a_trial_that_fails_gives_the_threads_back(cache) -> None:
    def make(*_) -> FloatLinear:
        raise MemoryError

    before = torch.ops.oatmill.set_own_threads(0)
    with pytest.raises(MemoryError):
        trials.measure({64: 96}, {"fma": (replace(float_weights(torch.float32), make=make), "fma")}, (1, 4))
    assert torch.ops.oatmill.set_own_threads(before) == 0


@pytest.mark.slow
def test_the_memory_of_trials_goes_back_to_the_system(cache, monkeypatch) -> None:
    monkeypatch.setattr(trials, "_read", lambda place: None)
    weights, shapes = float_weights(torch.float32), choice.plain_shapes(Model(torch.float32))
    trials.fastest(shapes, weights)  # what computing for the first time takes stays
    before = own_bytes()
    for _ in range(3):
        trials.fastest(shapes, weights)
        assert own_bytes() - before < 8 << 20


def test_small_models_are_not_measured(cache, caplog) -> None:
    caplog.set_level(logging.INFO)
    weights = float_weights(torch.float32)
    chosen = trials.fastest(choice.plain_shapes(nn.Sequential(nn.Linear(64, 64))), weights)
    assert chosen.kernels == weights.kernels[:1]
    assert "measured" not in caplog.text


class Group:
    """The first of two shards, or the second."""

    def __init__(self, rank: int, first: str) -> None:
        self.rank = rank
        self._first = first

    def exchange(self, message: str) -> list[str]:
        return [message, ""] if self.rank == 0 else [self._first, message]


def test_all_shards_take_what_the_first_has_measured(cache) -> None:
    model = Model(torch.float32)
    settings = {"pinned": "measure"}
    first = linear_factory(model, torch.float32, None, group=Group(0, ""), **settings)
    assert first.kernels
    assert linear_factory(model, torch.float32, None, group=Group(1, str(first.kernels)), **settings) == first
    other = linear_factory(model, torch.float32, None, group=Group(1, "fma,amx@16"), **settings)
    assert str(other.kernels) == "fma,amx@16"


def test_kernels_can_be_pinned() -> None:
    model = Model(torch.bfloat16)
    pinned = linear_factory(model, torch.bfloat16, None, pinned="fma")
    assert pinned(nn.Linear(64, 48).bfloat16())(torch.zeros(1, 64)).shape == (1, 48)
    assert str(pinned.kernels) == "fma"
    for wrong, said in (("magic", "this CPU has no magic"), ("fma@3", "begins at 1 row")):
        with pytest.raises(UnsupportedModel, match=said):
            linear_factory(model, torch.bfloat16, None, pinned=wrong)
