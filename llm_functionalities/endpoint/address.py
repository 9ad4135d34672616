"""Parses addresses in settings: those of endpoints (`tgi:80`, or a whole URL) and of name servers."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from shared.addresses import is_ip_address

DNS_PORT = 53

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")


@dataclass(frozen=True)
class Address:
    """The address of an endpoint. `path` has no slash at its end."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parses `host:port` or an http:// or https:// URL. Raises ValueError with the reason."""
        url = text if _SCHEME.match(text) else f"http://{text}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{text!r} is not an endpoint address: {error}") from None
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"{text!r} is not an endpoint address: give host:port or an http:// or https:// URL")
        if parts.username or parts.password:
            raise ValueError("an endpoint address cannot have a password: give the token with --endpoint-token")
        if not parts.hostname or re.search(r"\s", text):
            raise ValueError(f"{text!r} is not an endpoint address: it names no host")
        if parts.query or parts.fragment:
            raise ValueError(f"{text!r} is not an endpoint address: leave out what follows the path")
        default_port = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, port or default_port, parts.path.rstrip("/"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def parse_name_server(text: str) -> tuple[str, int]:
    """Parses `127.0.0.1`, `127.0.0.1:5353`, `::1` or `[::1]:5353` to address and port. Raises ValueError."""
    if is_ip_address(text):
        return text, DNS_PORT
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_ip_address(host) or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("give the address of a name server, with its port unless that is 53")
    return host, int(port)
