"""Memory without a name is read by other processes, cannot change, and goes with the processes that have it open."""

import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.stubs import generate_pb2 as pb
from tgi_server.shared_bytes import MemoryPlace, SharedBytes, SharedMemory
from tgi_server.wire import shared_from_message, shared_to_message, shares_memory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory without a name")

# Makes some memory, says where it is, and waits.
_OTHER = """
import sys
from tgi_server.shared_bytes import SharedMemory
first, second = SharedMemory.of([b"hello", bytes(range(256)) * 5000])
print(first.place.process, first.place.descriptor, first.place.inode, second.start, second.size, flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process() -> Iterator[tuple[subprocess.Popen[str], list[SharedBytes]]]:
    """Yields a process, and the bytes that it shares."""
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid, descriptor, inode, start, size = map(int, process.stdout.readline().split())
        place = MemoryPlace(pid, descriptor, inode)
        yield process, [SharedBytes(place, 0, 5), SharedBytes(place, start, size)]
        process.kill()


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_another_process_reads_it() -> None:
    before = open_files()
    with other_process() as (process, (first, second)):
        data = second.map()
        assert (first.map()[:], data[:]) == (b"hello", bytes(range(256)) * 5000)
        process.kill()
        process.wait()
        assert data[:2] == b"\0\1", "what is mapped stays until it is unmapped"
        with pytest.raises(OSError, match="No such file"):
            second.map()
    del data
    assert open_files() == before


def test_what_a_reader_writes_is_seen_by_nobody_else() -> None:
    (shared,) = SharedMemory.of([b"hello"])
    data = shared.map()
    data[0] = 0
    assert shared.map()[:] == b"hello"


def test_nobody_can_change_it_or_cut_it_off() -> None:
    (shared,) = SharedMemory.of([b"hello"])
    descriptor = shared.place.descriptor
    with pytest.raises(PermissionError):
        os.write(descriptor, b"a")
    with pytest.raises(PermissionError):
        os.truncate(descriptor, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 5)


def test_a_number_that_means_something_else_is_refused() -> None:
    (shared,) = SharedMemory.of([b"hello"])
    place = shared.place
    reader, writer = os.pipe()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    others = (
        MemoryPlace(place.process, place.descriptor, place.inode + 1),
        MemoryPlace(place.process, reader, os.fstat(reader).st_ino),
        MemoryPlace(place.process, unsealed, os.fstat(unsealed).st_ino),
    )
    for other in others:
        with pytest.raises(OSError, match="its memory is"):
            SharedMemory.open(other)
    for descriptor in (reader, writer, unsealed):
        os.close(descriptor)


def test_it_is_freed_with_the_last_object_that_has_it() -> None:
    before = open_files()
    first, second = SharedMemory.of([b"hello", b"world"])
    del first
    assert second.map()[:] == b"world"
    del second
    assert open_files() == before


def test_messages_have_its_place() -> None:
    first, second = SharedMemory.of([b"hello", b"world"])
    assert shared_from_message(shared_to_message(second)).map()[:] == b"world"
    assert shares_memory(shared_to_message(first))
    assert not shares_memory(pb.SharedBytes())
    assert not shares_memory(pb.SharedBytes(process=first.place.process, descriptor=10**6, inode=1, size=1))
