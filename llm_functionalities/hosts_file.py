"""Names that the machine itself knows: `/etc/hosts` and `localhost` (hosts(5), RFC 6761 section 6.3)."""

import ipaddress
from pathlib import Path

LOOPBACK = ("127.0.0.1", "::1")


def local_addresses(name: str, hosts_file: Path) -> list[str]:
    """Addresses of `name` in the order of the file; empty when the machine does not know the name."""
    wanted = name.rstrip(".").lower()
    if found := [address for address, names in _entries(hosts_file) if wanted in names]:
        return found
    return list(LOOPBACK) if wanted == "localhost" or wanted.endswith(".localhost") else []


def _entries(hosts_file: Path) -> list[tuple[str, list[str]]]:
    try:
        text = hosts_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []  # a container need not have one
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return [(words[0], [word.lower() for word in words[1:]]) for words in lines if words and is_address(words[0])]


def is_address(text: str) -> bool:
    """Whether `text` is an IPv4 or IPv6 address, an IPv6 zone (`fe80::1%eth0`) included."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
