"""Memory that is taken from the system before it is needed."""

import multiprocessing
import sys
import time
import weakref
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.unit.engine.own_memory import own_bytes, resident
from tgi_server.engine.backends import devices
from tgi_server.engine.backends.devices import cache_bytes
from tgi_server.engine.memory import (
    DeferredFree,
    PageReserve,
    forget_pages,
    low_mmap_threshold,
    mapped,
    read_once,
)

MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def test_the_first_bytes_of_each_tensor_are_taken_and_no_more() -> None:
    tensors = [mapped((64 * MIB,), torch.int8) for _ in range(2)] + [mapped((MIB,), torch.int8)]
    assert [resident(tensor) for tensor in tensors] == [0, 0, 0]
    PageReserve(tensors).take(16 * MIB)
    assert [resident(tensor) for tensor in tensors] == [16 * MIB, 16 * MIB, MIB]
    assert not any(tensor.any() for tensor in tensors)


def test_pages_of_a_file_are_given_back_and_read_again_when_they_are_needed(tmp_path: Path) -> None:
    numbers = torch.arange(4 * MIB, dtype=torch.int32)
    save_file({"numbers": numbers}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        tensor, own = file.get_slice("numbers")[...], numbers.clone()
        assert torch.equal(tensor, numbers)
        before = psutil.Process().memory_info().shared
        forget_pages([tensor, own])
        assert before - psutil.Process().memory_info().shared > 15 * MIB
        assert torch.equal(tensor, numbers)
        assert torch.equal(own, numbers)


def test_what_is_read_once_of_a_file_is_given_back_on_the_way(tmp_path: Path) -> None:
    numbers = torch.arange(4 * MIB, dtype=torch.int32).view(-1, 1024)
    save_file({"numbers": numbers}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        tensor = file.get_slice("numbers")[...]
        before, most, parts = psutil.Process().memory_info().shared, 0, []
        for part in read_once(tensor, 500):
            parts.append(part.clone())
            most = max(most, psutil.Process().memory_info().shared - before)
        assert torch.equal(torch.cat(parts), numbers)
        assert most < 8 * MIB


def bytes_that_large_tensors_leave() -> int:
    kept, before = [], own_bytes()
    with low_mmap_threshold():
        for _ in range(50):
            large = torch.ones(MIB)
            kept.append(large[:512].clone())
            del large
    return own_bytes() - before


@pytest.mark.slow
def test_large_tensors_leave_no_gaps_where_memory_is_kept_apart() -> None:
    # In a process of its own: here the KV cache of an earlier test's engine may still grow.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert processes.submit(bytes_that_large_tensors_leave).result() < 16 * MIB


def test_memory_is_returned_many_tensors_at_a_time() -> None:
    deferred, places = DeferredFree(), []
    for _ in range(5):
        tensor = torch.zeros(8 * MIB, dtype=torch.uint8)
        places.append(weakref.ref(tensor))
        deferred.add([tensor])
        del tensor
    assert [place() is None for place in places] == [True, True, True, True, False]
    deferred.free()
    assert places[-1]() is None


def test_memory_that_adapters_will_need_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_ram", lambda: 10_000)
    cpu = torch.device("cpu")
    assert cache_bytes(cpu, 1.0, None, 2, reserved=1_000) == cache_bytes(cpu, 1.0, None, 2) - 300
    assert cache_bytes(cpu, 1.0, None, 2, reserved=9_000) == 0
    assert cache_bytes(cpu, 1.0, 5_000, 2, reserved=9_000) == 2_500


def test_taking_pages_goes_on_where_the_time_was_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    tensors = [mapped((8 * MIB,), torch.int8) for _ in range(2)]
    reserve = PageReserve(tensors)
    reserve.take(6 * MIB, seconds=-1)
    assert [resident(tensor) for tensor in tensors] == [2 * MIB, 0]
    reserve.take(6 * MIB, seconds=-1)
    assert [resident(tensor) for tensor in tensors] == [2 * MIB, 2 * MIB]
    for _ in range(2):
        reserve.take(6 * MIB)
        assert [resident(tensor) for tensor in tensors] == [6 * MIB, 6 * MIB]
    reserve.take(100 * MIB)
    assert [resident(tensor) for tensor in tensors] == [8 * MIB, 8 * MIB]


def test_each_thread_takes_pages_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    tensors = [mapped((8 * MIB,), torch.int8) for _ in range(3)]
    PageReserve(tensors).take(6 * MIB, seconds=-1)
    assert [resident(tensor) for tensor in tensors] == [2 * MIB, 2 * MIB, 0]


def test_pages_are_taken_ahead_beside_what_else_is_done() -> None:
    tensors = [mapped((size * MIB,), torch.int8) for size in (8, 4)]
    reserve = PageReserve(tensors)

    def take_ahead(limit: int, *taken: int) -> None:
        reserve.take_ahead(limit * MIB)
        deadline = time.monotonic() + 20
        while [resident(tensor) for tensor in tensors] != [each * MIB for each in taken]:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    take_ahead(4, 4, 4)
    take_ahead(2, 4, 4)
    take_ahead(100, 8, 4)
