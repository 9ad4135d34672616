"""Files of images are decoded as `transformers` does, or refused with the reason."""

import io
import zlib

import pytest
from PIL import Image

from tests.image_files import gif, progressive
from tests.image_processors import as_file, photograph
from tgi_server.router.media.messages import UnusableImage
from tgi_server.router.media.worker import decoded

PIXELS = 10_000


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(kind):
    image = decoded(as_file(photograph(40, 30), kind), PIXELS)
    assert (image.mode, image.size) == ("RGB", (40, 30))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "I;16"])
def test_other_modes_become_rgb(mode):
    image = photograph(40, 30)
    source = image.convert("L").convert("I;16") if mode == "I;16" else image.convert(mode)
    assert (
        decoded(as_file(source), PIXELS).tobytes() == Image.open(io.BytesIO(as_file(source))).convert("RGB").tobytes()
    )


def test_a_small_file_with_many_pixels_is_decoded_if_they_are_allowed():
    assert decoded(gif(100, 100), PIXELS).size == (100, 100)
    assert decoded(progressive(40, 30, 90), PIXELS).size == (40, 30)


def test_cmyk_becomes_rgb():
    assert decoded(as_file(photograph(40, 30).convert("CMYK"), "JPEG"), PIXELS).mode == "RGB"


def test_an_image_is_turned_as_its_camera_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    image = decoded(as_file(photograph(40, 30), "JPEG", exif=exif), PIXELS)
    assert image.size == (30, 40)


def animation(kind: str) -> bytes:
    return as_file(photograph(20, 20), kind, save_all=True, append_images=[photograph(20, 20, 1)])


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_refused(kind):
    with pytest.raises(UnusableImage, match="animated"):
        decoded(animation(kind), PIXELS)


def chunk(name: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")


def bomb() -> bytes:
    """A file of a few bytes that says it has 65,000 x 65,000 pixels."""
    size = (65_000).to_bytes(4, "big") * 2
    head = chunk(b"IHDR", size + bytes([8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a JPEG"),
        (b"hello", "not a JPEG"),
        (b"<svg></svg>", "not a JPEG"),
        (as_file(photograph(40, 30))[:-60], "broken"),
        (as_file(photograph(40, 30), "JPEG")[:300], "broken"),
        (as_file(photograph(40, 30), "TIFF"), "not a JPEG"),
        (as_file(photograph(101, 100)), "--max-image-pixels"),
        (bomb(), "--max-image-pixels"),
        (gif(8000, 8000), "--max-image-pixels"),
        (progressive(40, 30, 700), "700 scans or more; at most 100"),
    ],
)
def test_what_cannot_be_used(data, reason):
    with pytest.raises(UnusableImage, match=reason):
        decoded(data, PIXELS)


def test_broken_files_are_refused():
    whole = as_file(photograph(40, 30), "JPEG")
    for place in range(2, len(whole), 97):
        broken = whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
        try:
            assert decoded(broken, PIXELS).mode == "RGB"
        except UnusableImage as error:
            assert str(error)  # noqa: PT017  # most of the changes are seen in the image alone
