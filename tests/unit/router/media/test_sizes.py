"""What a file says of its size is read without decoding it."""

import pytest

from tests.image_files import gif, progressive
from tests.image_processors import as_file, photograph
from tgi_server.router.media.sizes import scans, stated_work


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_pixels(kind):
    assert stated_work(as_file(photograph(40, 30), kind)) == 1200


@pytest.mark.parametrize("settings", [{"lossless": True}, {"exif": b"Exif\0\0", "lossless": True}])
def test_pixels_of_other_kinds_of_webp(settings):
    assert stated_work(as_file(photograph(40, 30), "WEBP", **settings)) == 1200


def test_a_small_file_may_say_that_it_is_large():
    assert (len(gif(8000, 8000)), stated_work(gif(8000, 8000))) == (56, 64_000_000)


def test_scans():
    plain = as_file(photograph(40, 30), "JPEG")
    assert (scans(plain), scans(as_file(photograph(40, 30)))) == (1, 0)
    assert scans(as_file(photograph(40, 30), "JPEG", progressive=True)) == 10
    assert scans(progressive(40, 30, 700)) == 700
    assert stated_work(progressive(40, 30, 700)) == 1200 * 700
    assert scans(plain + b"\xff\xda" * 200) == 1, "a film after the photograph"


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x89PNG", b"\xff\xd8", b"GIF89a", b"BM", b"RIFF", b"RIFF    WEBPVP8X"]
)
def test_what_says_nothing(data):
    assert stated_work(data) == 0


def test_more_segments_than_a_file_needs_count_as_scans():
    assert scans(b"\xff\xd8" + b"\xff\xe1\0\2" * 20_000) == 10_000
