"""The products of adapters for GPUs, in the interpreter, against those in plain torch."""

import pytest
import torch

from tests.gpu_without.check_kernels import products_of_bfloat16  # noqa: F401
from tgi_server.engine.backends.lora import AdapterRows, LoraDelta, TorchLora
from tgi_server.engine.backends.triton_lora import TritonLora, fault_of

INPUTS, OUTPUTS = 70, 150
ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-1, torch.float16: 3e-2}


def change(
    dtype: torch.dtype, ranks: tuple[int, ...], *, dora_scale: bool = False, bias_delta: bool = False
) -> LoraDelta:
    sizes = (40, 110)[: len(ranks)]
    return LoraDelta(
        torch.randn(sum(ranks), INPUTS).to(dtype) / 8,
        [torch.randn(rank, size).to(dtype) for rank, size in zip(ranks, sizes, strict=True)],
        [0, 40][: len(ranks)],
        torch.rand(OUTPUTS) + 0.5 if dora_scale else None,
        torch.randn(OUTPUTS) if bias_delta else None,
    )


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("rows", [5, 100])
def test_rows_are_changed_as_in_plain_torch(dtype: torch.dtype, with_residual: bool, rows: int) -> None:
    torch.manual_seed(0)
    plain, products = TorchLora(), TritonLora(OUTPUTS, 48, torch.device("cpu"))
    changes = {
        1: change(dtype, (3, 2)),
        2: change(dtype, (16, 1), dora_scale=True, bias_delta=True),
        4: change(dtype, (33, 7), bias_delta=True),
    }
    for number, each in changes.items():
        plain.put(number, each)
        products.put(number, each)
    numbers = torch.randint(0, 5, (rows,), dtype=torch.int32)
    given = AdapterRows(numbers, frozenset({1, 2, 3, 4}))
    x, y = torch.randn(rows, INPUTS).to(dtype), torch.randn(rows, OUTPUTS).to(dtype)
    residual = torch.randn(rows, OUTPUTS).to(dtype) if with_residual else None
    for _ in range(2):
        wanted = plain.apply(x, y.clone(), given, residual=residual)
        actual = products.apply(x, y.clone(), given, residual=residual)
        torch.testing.assert_close(actual.float(), wanted.float(), atol=ERROR[dtype], rtol=2e-2)
        plain.drop(2)
        products.drop(2)


@pytest.mark.parametrize("dtype", ERROR)
def test_the_kernels_are_found_to_be_right(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault_of(dtype, torch.device("cpu")) is None
    monkeypatch.setattr(TritonLora, "apply", lambda products, x, y, rows, **options: y)
    assert "is off by" in str(fault_of(dtype, torch.device("cpu")))
