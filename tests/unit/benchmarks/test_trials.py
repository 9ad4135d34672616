"""Times of kernels, real ones and made-up ones."""

from dataclasses import replace

import pytest
import torch

from benchmarks import trials
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.choice import Weights
from tgi_server.engine.linear.float import FloatLinear


@pytest.fixture(autouse=True)
def _kernels() -> None:
    assert load_kernels()


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


def own_threads() -> int:
    now: int = torch.ops.oatmill.set_own_threads(0)
    torch.ops.oatmill.set_own_threads(now)
    return now


def test_trials_run_on_threads_that_busy_cores_do_not_hold_up() -> None:
    plain, own = Weights.plain(torch.float32), []

    def make(*arguments) -> FloatLinear:
        layer = plain.make(*arguments)
        layer.register_forward_pre_hook(lambda *_: own.append(own_threads()))
        return layer

    before = torch.ops.oatmill.set_own_threads(0)
    trials.measure({64: 96}, {"fma": (replace(plain, make=make), "fma")}, (1, 4))
    assert own
    assert all(own)
    assert torch.ops.oatmill.set_own_threads(before) == 0


def test_a_trial_that_fails_gives_the_threads_back() -> None:
    def make(*_) -> FloatLinear:
        raise MemoryError

    before = torch.ops.oatmill.set_own_threads(0)
    with pytest.raises(MemoryError):
        trials.measure({64: 96}, {"fma": (replace(Weights.plain(torch.float32), make=make), "fma")}, (1, 4))
    assert torch.ops.oatmill.set_own_threads(before) == 0
