"""Addresses and ports of the Internet Protocol."""

import ipaddress
import socket
from contextlib import ExitStack


def is_ip_address(text: str) -> bool:
    """Returns True for an IPv4 or IPv6 address. An IPv6 address may have a zone, as in `fe80::1%eth0`."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Returns True for an address that only this machine can reach, and for the name `localhost`."""
    return ipaddress.ip_address(host).is_loopback if is_ip_address(host) else host == "localhost"


def free_port(hostname: str = "127.0.0.1") -> int:
    """Returns a port of that address that is free at the moment."""
    (port,) = free_ports(1, hostname)
    return port


def free_ports(count: int, hostname: str = "127.0.0.1") -> list[int]:
    """Returns different ports of that address that are free at the moment."""
    (family, *_, address), *_ = socket.getaddrinfo(hostname, 0, type=socket.SOCK_STREAM)
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(address[:2], family=family)) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
