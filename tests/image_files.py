"""Small files that take much work to decode."""

from tests.image_processors import as_file, photograph


def gif(width: int, height: int) -> bytes:
    """Returns a GIF of 56 bytes, with one pixel on a screen that has as many as it says."""
    size = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    head = b"GIF89a" + size + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    control = b"\x21\xf9\x04\0\0\0\0\0"
    frame = b"\x2c\0\0\0\0\x01\0\x01\0\0" + b"\x02" + b"\x02\x44\x01\0"
    return (head + control + frame + b"\x21\xfe\0").ljust(55, b"\0") + b"\x3b"


def progressive(width: int, height: int, scans: int) -> bytes:
    """Returns a progressive JPEG whose last scan is repeated."""
    data = as_file(photograph(width, height), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * (scans - 9) + data[-2:]
