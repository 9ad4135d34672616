import pytest

from shared.addresses import free_ports, is_loopback


def test_free_ports_are_different() -> None:
    assert len(set(free_ports(100))) == 100


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.2", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("oats.example", False),
    ],
)
def test_loopback_addresses(host: str, *, expected: bool) -> None:
    assert is_loopback(host) is expected
