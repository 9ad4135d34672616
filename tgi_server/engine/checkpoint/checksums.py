"""Checksums of the parts of an archive (ZIP), each compared once with the bytes that are read."""

import mmap
import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from shared.control_groups import usable_cores


class Checksums:
    """The checksums of an archive whose parts are not compressed."""

    def __init__(self, file: int, parts: dict[int, tuple[int, int]]) -> None:
        """file: its descriptor. parts: size and CRC-32 of each part, by the offset of its first byte."""
        self._file = file
        self._parts = parts
        self._checked: set[int] = set()

    @classmethod
    def of(cls, file: int) -> Self:
        """Reads the archive's directory. Raises OSError, struct.error or BadZipFile for a file that is damaged."""
        with open(file, "rb", closefd=False) as stream, zipfile.ZipFile(stream) as archive:
            parts = {}
            for part in archive.infolist():
                stream.seek(part.header_offset + 26)
                name, extra = struct.unpack("<HH", stream.read(4))  # bytes in front of the part
                parts[part.header_offset + 30 + name + extra] = part.file_size, part.CRC
        return cls(file, parts)

    def check(self, least: int | None = None) -> None:
        """Checks all unchecked parts, or only those of less than `least` bytes. Raises OSError."""
        chosen = [
            start
            for start, (size, _) in self._parts.items()
            if start not in self._checked and (least is None or size < least)
        ]
        with (
            mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as content,
            ThreadPoolExecutor(usable_cores()) as threads,
        ):

            def checksum(start: int) -> int:
                return zlib.crc32(content[start : start + self._parts[start][0]])

            for start, found in zip(chosen, threads.map(checksum, chosen), strict=True):
                self.compare(start, found)

    def has(self, start: int, size: int) -> bool:
        """Returns True if these bytes are a part of the archive."""
        return start in self._parts and self._parts[start][0] == size

    def compare(self, start: int, found: int) -> None:
        """Checks a part whose bytes have the CRC-32 `found`. Raises OSError."""
        if self._parts[start][1] != found:
            raise OSError("its checksums are wrong")
        self._checked.add(start)
