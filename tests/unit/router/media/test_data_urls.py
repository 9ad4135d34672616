"""Data URLs have the bytes of an image, whatever their form."""

from urllib.parse import quote_from_bytes

import pytest

from tgi_server.router.media import data_urls
from tgi_server.router.media.data_urls import data_of
from tgi_server.router.media.messages import UnusableImage


def test_a_data_url_has_the_bytes():
    assert data_of("data:image/png;base64,aGVsbG8=") == b"hello"
    assert data_of("DATA:image/png;BASE64,aGVs\nbG8=") == b"hello"
    assert data_of("data:,a%20b") == b"a b"


@pytest.mark.parametrize("piece", [1, 2, 3, 4, 5, 2**16])
def test_signs_are_read_whole_wherever_they_stand(piece, monkeypatch):
    monkeypatch.setattr(data_urls, "_PIECE", max(piece, 3))
    data = bytes(range(256)) * 2 + b"plain" + b"%" * 7
    assert data_of("data:image/png," + quote_from_bytes(data)) == data


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,????", "not base64"),
        ("data:image/png;base64,aGVsbG8", "not base64"),
        ("data:image/png;base64,\u00e9", "not base64"),
        ("data:image/png", "no comma"),
    ],
)
def test_others_are_refused(url, reason):
    with pytest.raises(UnusableImage, match=reason):
        data_of(url)


@pytest.mark.parametrize("url", ["data:," + "a" * 1001, "data:;base64," + "YWFh" * 400])
def test_an_image_has_a_bound_of_bytes(url, monkeypatch):
    monkeypatch.setattr(data_urls, "MOST_BYTES", 1000)
    with pytest.raises(UnusableImage, match="may have 1000"):
        data_of(url)
