"""What can be checked before anything is started, so that a mistake is told at once."""

import errno
import os
import socket
from pathlib import Path

from tgi_server.launcher.errors import CannotStartError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")


def check_tokenizer(folder: Path) -> None:
    """Raises CannotStartError when the model's folder has no tokenizer."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise CannotStartError(f"{folder} has no tokenizer.json, nor a tokenizer of an older kind")


def check_port(hostname: str, port: int, flag: str, address_flag: str = "--hostname") -> None:
    """Raises CannotStartError when `hostname` is not of this machine, or the port cannot be listened on.

    flag, address_flag: what the user would change. Port 0 stands for none.
    """
    if port != 0:
        _bind(hostname, port, flag, address_flag)


def check_address(hostname: str, flag: str) -> None:
    """Raises CannotStartError when `hostname` is not an address of this machine."""
    _bind(hostname, 0, flag, flag)


def free_port(hostname: str = "127.0.0.1") -> int:
    """A port of that address that nobody listens on at the moment."""
    (family, *_, address), *_ = socket.getaddrinfo(hostname, 0, type=socket.SOCK_STREAM)
    with socket.create_server(address[:2], family=family) as probe:
        return probe.getsockname()[1]


def _bind(hostname: str, port: int, flag: str, address_flag: str) -> None:
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CannotStartError(f"{address_flag}: {hostname} is not an address that is known here") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise CannotStartError(_explain(error, hostname, port, flag, address_flag)) from error


def _explain(error: OSError, hostname: str, port: int, flag: str, address_flag: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} is in use; choose another with {flag}"
        case errno.EACCES:
            return f"port {port} may not be used by this user; choose one above 1023 with {flag}"
        case errno.EADDRNOTAVAIL:
            return f"{address_flag}: {hostname} is not an address of this machine"
    return f"port {port} of {hostname} cannot be listened on: {os.strerror(error.errno or 0)}"
