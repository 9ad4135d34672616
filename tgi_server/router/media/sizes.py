"""Estimates the work of decoding an image from the headers of its file, without decoding anything."""

import re
import struct
from collections.abc import Callable

# The next marker of a JPEG within or after the data of a scan, where a byte of 255 is followed by 0 or a restart.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_SCAN, _END = 0xDA, 0xD9
# Markers of a JPEG that are followed. A file with more counts as one with as many scans.
_MOST_MARKERS = 10_000


def stated_work(data: bytes) -> int:
    """Returns the pixels that the file of an image says it has, times its scans; 0 where it says nothing."""
    if data.startswith(b"\xff\xd8"):
        pixels, scans = _jpeg(data)
        return pixels * max(scans, 1)
    return next((size(data) for magic, size in _SIZES if data.startswith(magic)), 0)


def scans(data: bytes) -> int:
    """Returns how often a JPEG goes over its pixels; 0 for any other file."""
    return _jpeg(data)[1] if data.startswith(b"\xff\xd8") else 0


def _jpeg(data: bytes) -> tuple[int, int]:
    """Returns the pixels and the scans of the first image in a JPEG file. Others may follow it."""
    pixels = found = 0
    position = 2
    for _ in range(_MOST_MARKERS):
        marker = _MARKER.search(data, position)
        if marker is None or (kind := data[marker.start() + 1]) == _END:
            return pixels, found
        position = marker.end()
        length = int.from_bytes(data[position : position + 2], "big")
        if kind in _FRAMES and len(data) >= position + 7:
            height, width = struct.unpack_from(">HH", data, position + 3)
            pixels = max(pixels, height * width)
        found += kind == _SCAN
        position += max(length, 2)
    return pixels, _MOST_MARKERS


def _by(layout: str, offset: int) -> Callable[[bytes], int]:
    """Returns a function that reads width and height at an offset, and returns the pixels."""

    def size(data: bytes) -> int:
        if len(data) < offset + struct.calcsize(layout):
            return 0
        width, height = struct.unpack_from(layout, data, offset)
        return abs(int(width) * int(height))

    return size


def _webp(data: bytes) -> int:
    kind = data[12:16]
    if kind == b"VP8X" and len(data) >= 30:
        return (int.from_bytes(data[24:27], "little") + 1) * (int.from_bytes(data[27:30], "little") + 1)
    if kind == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
    return _by("<HH", 26)(data)


_SIZES: tuple[tuple[bytes, Callable[[bytes], int]], ...] = (
    (b"\x89PNG", _by(">II", 16)),
    (b"GIF8", _by("<HH", 6)),
    (b"BM", _by("<ii", 18)),
    (b"RIFF", _webp),
)
