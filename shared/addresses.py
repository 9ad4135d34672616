"""Addresses of the Internet Protocol, as text."""

import ipaddress


def is_ip_address(text: str) -> bool:
    """Returns True for an IPv4 or IPv6 address. An IPv6 address may have a zone, as in `fe80::1%eth0`."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
