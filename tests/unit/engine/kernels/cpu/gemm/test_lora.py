"""The small products of adapters, beside plain torch."""

import pytest
import torch

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.float import FloatLinear

pytestmark = pytest.mark.skipif(not load_kernels(), reason="the CPU kernels are not available")

INPUTS, OUTPUTS = 37, 150


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_each_row_is_changed_by_its_adapter(dtype: torch.dtype, with_residual: bool) -> None:
    torch.manual_seed(0)
    adapters = torch.classes.oatmill.Adapters(OUTPUTS)
    # by number: the ranks of two parts, the first outputs of which are 20 and 90; and a dora_scale, and a bias_delta
    kinds = {1: ((3, 4), False, False), 3: ((17, 1), True, True), 4: ((1, 2), True, False)}
    dense = {}
    for number, (ranks, dora_scales, bias_deltas) in kinds.items():
        a = torch.randn(sum(ranks), INPUTS).to(dtype)
        b = [torch.randn(rank, outputs).to(dtype) for rank, outputs in zip(ranks, (33, 60), strict=True)]
        dora_scale = torch.rand(OUTPUTS) + 0.5 if dora_scales else None
        bias_delta = torch.randn(OUTPUTS) if bias_deltas else None
        adapters.put(number, a, b, [20, 90], dora_scale, bias_delta)
        product = torch.zeros(OUTPUTS, INPUTS)
        product[20:53] = b[0].float().t() @ a[: ranks[0]].float()
        product[90:] = b[1].float().t() @ a[ranks[0] :].float()
        dense[number] = (product, 1 if dora_scale is None else dora_scale, 0 if bias_delta is None else bias_delta)
    numbers = torch.tensor([0, 1, 3, 1, 2, 4, 3, 1, 1, 1, 1, 0] + [4] * 70, dtype=torch.int32)
    x = torch.randn(len(numbers), INPUTS).to(dtype)
    weight = torch.randn(OUTPUTS, INPUTS).to(dtype) / 8
    layer = FloatLinear(weight)
    layer.kernel().adapt(adapters)
    y = x.float() @ weight.float().t()
    residual = torch.randn(len(numbers), OUTPUTS).to(dtype) if with_residual else None
    expected = []
    for number, given, own in zip(numbers.tolist(), x.float(), y, strict=True):
        product, dora_scale, bias_delta = dense.get(number, (torch.zeros(OUTPUTS, INPUTS), 1, 0))
        expected.append(dora_scale * own + product @ given + bias_delta)
    wanted = torch.stack(expected)
    wanted = wanted if residual is None else wanted + residual.float()
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-1, torch.float16: 2e-2}[dtype]
    actual = layer.kernel().adapted(x, numbers, residual)
    torch.testing.assert_close(actual.float(), wanted, atol=tolerance, rtol=1e-2)
    # Those that no adapter changes are as without adapters, to the last bit.
    plain, unchanged = layer.kernel().forward(x, residual), (numbers == 0) | (numbers == 2)
    assert torch.equal(actual[unchanged], plain[unchanged])
    adapters.drop(3)
    row = layer.kernel().adapted(x[2:3], numbers[2:3], None)
    assert torch.equal(row, layer.kernel().forward(x[2:3], None))


def test_a_row_has_the_same_bits_whoever_is_beside_it() -> None:
    torch.manual_seed(0)
    adapters = torch.classes.oatmill.Adapters(OUTPUTS)
    adapters.put(1, torch.randn(5, INPUTS), [torch.randn(5, OUTPUTS)], [0], None, None)
    x, y = torch.randn(7, INPUTS), torch.randn(7, OUTPUTS)
    together = adapters.apply(x, y.clone(), torch.ones(7, dtype=torch.int32))
    for row in range(7):
        alone = adapters.apply(x[row : row + 1], y[row : row + 1].clone(), torch.ones(1, dtype=torch.int32))
        assert torch.equal(alone[0], together[row])
