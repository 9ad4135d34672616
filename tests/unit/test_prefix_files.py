import os
from pathlib import Path

import pytest

from tgi_server.prefix_files import MOST_ENTRIES, Header, UnusableFile

HEADER = Header(b"l" * 16, b"b" * 16, tuple(bytes([number]) * 16 for number in range(3)), 10, (1, 2, 2**32 - 1))


def _read(file: Path) -> Header:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return Header.read(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("entries", [1, 3, MOST_ENTRIES])
def test_a_header_is_read_as_it_was_written(tmp_path: Path, entries: int) -> None:
    header = Header(HEADER.layout, HEADER.before, entries * (b"d" * 16,), 7, tuple(range(entries)))
    file = tmp_path / "file"
    file.write_bytes(header.packed() + bytes(7 * entries))
    assert _read(file) == header
    assert (file.stat().st_size, header.offset(entries)) == (header.file_bytes, header.file_bytes)


def test_any_other_content_is_refused(tmp_path: Path) -> None:
    file, content = tmp_path / "file", HEADER.packed() + bytes(30)
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(UnusableFile):
            _read(file)
    for place in range(HEADER.size):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(UnusableFile):
            _read(file)
