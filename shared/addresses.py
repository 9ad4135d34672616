"""Addresses and ports of the Internet Protocol."""

import ipaddress
import socket


def is_ip_address(text: str) -> bool:
    """Returns True for an IPv4 or IPv6 address. An IPv6 address may have a zone, as in `fe80::1%eth0`."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def free_port(hostname: str = "127.0.0.1") -> int:
    """Returns a port of that address that is free at the moment."""
    (family, *_, address), *_ = socket.getaddrinfo(hostname, 0, type=socket.SOCK_STREAM)
    with socket.create_server(address[:2], family=family) as probe:
        port: int = probe.getsockname()[1]
        return port
