"""What torch is asked to do."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tgi_server.contract import ReportParameters
from tgi_server.engine.sampling import TokenMask, TorchSampler

from .conftest import CPU
from .test_sampler import GREEDY, KINDS, SILENT


class Operations(TorchDispatchMode):
    """Records the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest_float = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func.overloadpacket))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.largest_float = max(self.largest_float, result.numel())
        return result


def test_greedy_batches_are_one_operation() -> None:
    sampler = TorchSampler(8, 100, CPU)
    for row in range(8):
        sampler.add(row, KINDS["ignored warpers"] if row == 0 else GREEDY, SILENT, [1, 2], [])
    with Operations() as operations:
        sampled = sampler.sample(torch.randn(8, 100).bfloat16(), range(8))
        computed = len(operations.names)
        sampler.accept(sampled.token_ids, range(8))
    assert operations.names[-1] in ("aten.max", "oatmill.argmax")
    assert computed == len(operations.names)
    assert "aten._to_copy" not in operations.names[2:]


def test_greedy_rows_are_not_processed_along() -> None:
    sampler = TorchSampler(8, 100, CPU)
    logits = torch.randn(8, 100).bfloat16()
    for row in range(8):
        sampler.add(row, KINDS["everything"] if row in (2, 5) else GREEDY, SILENT, [1, 2], [])
    with Operations() as operations:
        sampled = sampler.sample(logits, range(8))
    assert 0 < operations.largest_float <= 2 * 100
    greedy = [row for row in range(8) if row not in (2, 5)]
    assert torch.equal(sampled.token_ids[greedy], logits.argmax(-1)[greedy])


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the meta device have no data: reading one on the host raises."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    meta = torch.device("meta")
    sampler = TorchSampler(len(KINDS), 100, meta)
    for row, parameters in enumerate(KINDS.values()):
        sampler.add(row, parameters, ReportParameters(True, 5), [1, 2], [3])
    mask = TokenMask(torch.empty(2, 4, dtype=torch.int32, device=meta), [0, 9])
    rows = range(len(KINDS))
    sampled = sampler.sample(torch.empty(len(KINDS), 100, dtype=torch.bfloat16, device=meta), rows, mask)
    sampler.accept(sampled.token_ids, rows)
    sampler.move(len(KINDS) - 1, 0)
    with pytest.raises(RuntimeError):
        sampled.start_copy().wait()


def test_steady_batches_copy_nothing_to_the_device() -> None:
    sampler, rows = TorchSampler(len(KINDS), 100, CPU), list(range(len(KINDS)))
    for row, parameters in enumerate(KINDS.values()):
        sampler.add(row, parameters, SILENT, [1, 2], [3])
    logits = torch.randn(len(KINDS), 100)
    with Operations() as first:
        sampler.accept(sampler.sample(logits, rows).token_ids, rows)
    with Operations() as second:
        sampler.accept(sampler.sample(logits, rows).token_ids, rows)
    assert "aten.lift_fresh" in first.names  # what torch.tensor does
    assert "aten.lift_fresh" not in second.names
