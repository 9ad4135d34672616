"""Weights that are copied from a file have its contents, and are found there again."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tgi_server.engine.checkpoint.checksums import Checksums
from tgi_server.engine.checkpoint.stored_weights import LEAST, FileState, copied_from, copy_of_stored, place_of
from tgi_server.engine.kernels import load_kernels

MIB = 1 << 20

pytestmark = pytest.mark.skipif(not load_kernels(), reason="the CPU kernels are not available")


def weights() -> list[Tensor]:
    """One of many pieces, two that threads read, and one that is small."""
    torch.manual_seed(0)
    sizes = {torch.int8: (20, MIB), torch.bfloat16: (3, 100_001), torch.float32: (MIB,), torch.uint8: (9, 9)}
    return [torch.randint(0, 100, size).to(dtype) for dtype, size in sizes.items()]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(weights(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def copies(file: Path, *, cut: int | None = None) -> list[Tensor]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        with copied_from(file, descriptor, Checksums.of(descriptor)):
            found = [copy_of_stored(weight) for weight in torch.load(file, mmap=True)]
            if cut is not None:
                os.truncate(file, cut)
    finally:
        os.close(descriptor)
    return found


def test_copies_have_the_contents_of_the_file(file: Path) -> None:
    found = copies(file)
    content, state = file.read_bytes(), FileState.of(file)
    for copy, weight in zip(found, weights(), strict=True):
        assert copy.dtype == weight.dtype
        assert torch.equal(copy, weight)
        assert copy.data_ptr() % 64 == 0
        place = place_of(copy)
        assert place is not None
        assert (place.path, place.state) == (file, state)
        stored = content[place.offset : place.offset + copy.nbytes]
        assert stored == bytes(copy.flatten().view(torch.uint8).numpy())


def test_a_weight_of_no_file_is_copied(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    with copied_from(file, descriptor, Checksums.of(descriptor)):
        pairs = [(weight, copy_of_stored(weight)) for weight in weights()]
    os.close(descriptor)
    assert all(torch.equal(weight, copy) and place_of(copy) is None for weight, copy in pairs)
    outside = copy_of_stored(pairs[0][0])
    assert torch.equal(outside, pairs[0][0])


def test_a_file_that_has_become_shorter_is_an_error(file: Path) -> None:
    with pytest.raises(OSError, match="ends early"):
        copies(file, cut=4 * MIB)


@pytest.mark.parametrize("number", range(4))
def test_a_bit_that_has_changed_is_an_error_wherever_it_is(file: Path, number: int) -> None:
    place = place_of(copies(file)[number])
    assert place is not None
    with file.open("r+b") as stream:
        stream.seek(place.offset + 1)
        value = stream.read(1)[0]
        stream.seek(place.offset + 1)
        stream.write(bytes([value ^ 1]))
    descriptor = os.open(file, os.O_RDONLY)
    checksums = Checksums.of(descriptor)
    with pytest.raises(OSError, match="checksums are wrong"):  # noqa: PT012
        checksums.check(LEAST)
        with copied_from(file, descriptor, checksums):
            _ = [copy_of_stored(weight) for weight in torch.load(file, mmap=True)]
    os.close(descriptor)


def test_parts_that_nobody_copies_are_checked(file: Path) -> None:
    place = place_of(copies(file)[0])
    assert place is not None
    descriptor = os.open(file, os.O_RDONLY)
    checksums = Checksums.of(descriptor)
    checksums.check()
    with file.open("r+b") as stream:
        stream.seek(place.offset)
        stream.write(b"\xff\x00\xff")
    checksums.check()  # once
    with pytest.raises(OSError, match="checksums are wrong"):
        Checksums.of(descriptor).check()
    os.close(descriptor)
