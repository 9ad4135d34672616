import pytest

from llm_functionalities.endpoint.address import Address


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("tgi:80", "http://tgi:80"),
        ("tgi", "http://tgi:80"),
        ("http://tgi", "http://tgi:80"),
        ("https://models.example/tgi/", "https://models.example:443/tgi"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("[::1]:8080", "http://[::1]:8080"),
        ("http://[2001:db8::1]", "http://[2001:db8::1]:80"),
        ("HTTP://TGI:80", "http://tgi:80"),
    ],
)
def test_what_an_endpoint_may_be(text: str, url: str) -> None:
    assert str(Address.parse(text)) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://",
        ":80",
        "tgi:port",
        "tgi:99999",
        "ftp://tgi",
        "http://user:secret@tgi",
        "tgi:80?x=1",
        "t gi",
        "[::1",
    ],
)
def test_what_it_may_not_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"endpoint address"):
        Address.parse(text)
