"""The format of files with cached prefixes. Shards write and read them; the router finds them by their headers.

A file has a header, and entries of equal length: each is the KV block of one index in all layers, or one snapshot of
states. The file contains digests of texts, not the texts.
"""

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

DIGEST_BYTES = 16
# The last character is the version of the format.
_MAGIC = b"oatmill prefix 1"
# Magic, bytes of the header, layout, before, number of entries, bytes of an entry.
_FIXED = struct.Struct(f"<{len(_MAGIC)}sI{DIGEST_BYTES}s{DIGEST_BYTES}sIQ")
_CHECKSUM = struct.Struct("<I")
# Maximum number of entries of a file: blocks are held while they are written.
MOST_ENTRIES = 64
_LONGEST_HEADER = 4096


class UnusableFile(ValueError):
    """A file that is damaged, or does not have the expected contents."""


def file_of(path: Path, rank: int) -> Path:
    """Returns the path of the file that the shard with this rank writes."""
    return path.with_name(f"{path.name}.{rank}")


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file.

    layout: a digest of all that the entries depend on, except the text. before: the digest of the text before the first
    entry. digests: the digest of the text up to the end of each entry. entry_bytes: the length of an entry. checksums:
    the CRC-32 of each entry.
    """

    layout: bytes
    before: bytes
    digests: tuple[bytes, ...]
    entry_bytes: int
    checksums: tuple[int, ...]

    @property
    def size(self) -> int:
        """The bytes of the header."""
        return _FIXED.size + len(self.digests) * (DIGEST_BYTES + _CHECKSUM.size) + _CHECKSUM.size

    @property
    def file_bytes(self) -> int:
        return self.size + len(self.digests) * self.entry_bytes

    def offset(self, entry: int) -> int:
        """Returns where an entry begins in the file."""
        return self.size + entry * self.entry_bytes

    def packed(self) -> bytes:
        """Returns the header as it stands in the file, with a checksum of its own."""
        fixed = _FIXED.pack(_MAGIC, self.size, self.layout, self.before, len(self.digests), self.entry_bytes)
        body = fixed + b"".join(self.digests) + b"".join(map(_CHECKSUM.pack, self.checksums))
        return body + _CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def read(cls, file: int) -> Self:
        """Returns the header of an open file. Raises UnusableFile, also for a file that ends early, and OSError."""
        content = os.pread(file, _LONGEST_HEADER, 0)
        if len(content) < _FIXED.size or not content.startswith(_MAGIC):
            raise UnusableFile("it is not a file of this version")
        _, size, layout, before, entries, entry_bytes = _FIXED.unpack_from(content)
        width = DIGEST_BYTES + _CHECKSUM.size
        if size != _FIXED.size + entries * width + _CHECKSUM.size or size > len(content):
            raise UnusableFile("its header is damaged")
        body = content[: size - _CHECKSUM.size]
        if _CHECKSUM.unpack_from(content, len(body)) != (zlib.crc32(body),):
            raise UnusableFile("the checksum of its header is wrong")
        digests, checksums = body[_FIXED.size : size - (entries + 1) * _CHECKSUM.size], body[-entries * 4 :]
        header = cls(
            layout,
            before,
            tuple(digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)),
            entry_bytes,
            tuple(checksum for (checksum,) in _CHECKSUM.iter_unpack(checksums)) if entries else (),
        )
        if os.fstat(file).st_size != header.file_bytes:
            raise UnusableFile("it is not as long as its header says")
        return header
