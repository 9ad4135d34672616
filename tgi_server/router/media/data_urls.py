"""The bytes of an image in a data URL (RFC 2397)."""

import binascii
from urllib.parse import unquote_to_bytes

from tgi_server.router.media.messages import UnusableImage

# Bytes of one image, as it is sent.
MOST_BYTES = 20 * 2**20
_BLANKS = b" \t\n\r\v\f"
# Characters that are decoded at a time, so that other threads run in between.
_PIECE = 2**16


def data_of(url: str) -> bytes:
    """Returns the content of a data URL. Raises UnusableImage."""
    head, comma, content = url.partition(",")
    if not comma:
        raise UnusableImage("its data URL has no comma before the data")
    if not head[-40:].rstrip().lower().endswith(";base64"):
        data = _unquoted(content)
    else:
        try:
            data = binascii.a2b_base64(content.encode("ascii").translate(None, _BLANKS), strict_mode=True)
        except ValueError:
            raise UnusableImage("its data is not base64") from None
    check_size(len(data))
    return data


def check_size(size: int) -> None:
    """Raises UnusableImage for more bytes than an image may have."""
    if size > MOST_BYTES:
        raise UnusableImage(f"it has {size} bytes or more; an image may have {MOST_BYTES}")


def _unquoted(content: str) -> bytes:
    pieces: list[bytes] = []
    start = size = 0
    while start < len(content):
        end = start + _PIECE
        # A sign and its two digits stay together.
        end -= next((back for back in (1, 2) if content[end - back : end - back + 1] == "%"), 0)
        pieces.append(unquote_to_bytes(content[start:end]))
        size += len(pieces[-1])
        check_size(size)
        start = end
    return b"".join(pieces)
