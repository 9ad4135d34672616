"""An endpoint's address as it is written in settings: `tgi:80` or a whole URL."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")


@dataclass(frozen=True)
class Address:
    scheme: str
    host: str
    port: int
    path: str
    """Without a slash at its end."""

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Raises ValueError with what is wrong with `text`."""
        url = text if _SCHEME.match(text) else f"http://{text}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{text!r} is no endpoint address: {error}") from None
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"{text!r} is no endpoint address: give host:port or an http:// or https:// URL")
        if parts.username or parts.password:
            raise ValueError("an endpoint address holds no password: give the token with --endpoint-token")
        if not parts.hostname or re.search(r"\s", text):
            raise ValueError(f"{text!r} is no endpoint address: it names no host")
        if parts.query or parts.fragment:
            raise ValueError(f"{text!r} is no endpoint address: leave out what follows the path")
        default_port = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, port or default_port, parts.path.rstrip("/"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"
