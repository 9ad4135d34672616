"""Memory that is taken from the system before it is needed."""

import ctypes
import mmap
import sys
import time

import pytest
import torch

from tgi_server.engine.memory import Prefault, mapped

MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the tensor, from its beginning, for which there are pages."""
    pages = (ctypes.c_ubyte * -(-tensor.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_the_first_bytes_of_each_tensor_are_taken_and_no_more() -> None:
    tensors = [mapped((64 * MIB,), torch.int8) for _ in range(2)] + [mapped((MIB,), torch.int8)]
    assert [resident(tensor) for tensor in tensors] == [0, 0, 0]
    prefault = Prefault(tensors, 16 * MIB)
    deadline = time.monotonic() + 30
    while any(resident(tensor) < 16 * MIB for tensor in tensors[:2]) and time.monotonic() < deadline:
        time.sleep(0.01)
    prefault.stop()
    assert [resident(tensor) for tensor in tensors] == [16 * MIB, 16 * MIB, MIB]
    assert not any(tensor.any() for tensor in tensors)


def test_it_can_be_stopped_at_any_time() -> None:
    tensor = mapped((1024 * MIB,), torch.int8)
    Prefault([tensor], 1024 * MIB).stop()
    taken = resident(tensor)
    time.sleep(0.05)
    assert resident(tensor) == taken < 1024 * MIB
