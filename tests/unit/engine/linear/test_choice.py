"""The choice of kernels: by the table in the repository, and by name."""

import pytest
import torch
from torch import nn

from benchmarks.kernels import equal_bits, kinds_of_weights
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear import choice, linear_factory
from tgi_server.engine.linear.choice import Weights
from tgi_server.engine.linear.kernel_table import KernelTable


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


def test_kernels_can_be_pinned() -> None:
    model = Model(torch.bfloat16)
    pinned = linear_factory(model, torch.bfloat16, None, pinned="fma")
    assert pinned(nn.Linear(64, 48).bfloat16())(torch.zeros(1, 64)).shape == (1, 48)
    assert str(pinned.kernels) == "fma"
    for wrong, said in (("magic", "this CPU has no magic"), ("fma@3", "begins at 1 row")):
        with pytest.raises(UnsupportedModel, match=said):
            linear_factory(model, torch.bfloat16, None, pinned=wrong)
