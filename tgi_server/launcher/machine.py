"""GPUs, addresses and ports of this machine. No torch, whose import takes seconds."""

import errno
import importlib.util
import os
import socket
import sys

from shared.control_groups import usable_cores
from shared.gpus import has_gpu, listed_gpus, missing_gpus, visible_gpus
from shared.processes import port_name
from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.settings import LauncherSettings

# The command that installs the model server from the files of a release, since the package is not on an index.
INSTALL = "pip install --find-links dist 'oatmill[server]'"
# Packages of router and shards, which the extra `server` installs.
_PACKAGES = ("torch", "transformers", "tokenizers", "starlette", "uvicorn", "uvloop", "msgspec", "psutil")


def check_packages() -> None:
    """Raises CannotStartError if the packages of the model server are not installed, as the gRPC service needs none."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise CannotStartError(f"the model server lacks {', '.join(missing)}; run {INSTALL}")


def shard_count(settings: LauncherSettings) -> int:
    """Returns the number of shards of this machine.

    Without --num-shard and --sharded, the GPUs that a variable lists are counted, and there is one shard if none does.
    Raises CannotStartError when `--sharded=true` leaves the number to the GPUs, and there are not several.
    """
    if settings.num_shard is not None:
        if settings.sharded == "true" and settings.num_shard * settings.num_nodes == 1:
            raise CannotStartError(
                "--sharded needs several shards; give --num-shard more than 1, or leave --sharded out"
            )
        return settings.num_shard
    if settings.sharded == "false":
        return 1
    if settings.sharded is None:
        return max(1, len(listed_gpus() or ()))
    count = visible_gpus()
    if count == 0:
        raise CannotStartError(
            "--sharded: no GPU is visible; give --num-shard the number of processes that share the CPUs"
        )
    if count == 1 and settings.num_nodes == 1:
        raise CannotStartError("--sharded: only one GPU is visible; leave --sharded out, or make more of them visible")
    return count


def check_gpus() -> None:
    """Raises CannotStartError if a variable requests GPUs and this machine has none."""
    if not has_gpu() and (missing := missing_gpus("this machine has no GPU")):
        raise CannotStartError(missing)


def check_shards(shards: int) -> None:
    """Raises CannotStartError if more shards than cores would share the CPUs."""
    cores = usable_cores()
    if shards > cores and not visible_gpus():
        raise CannotStartError(
            f"{shards} shards would share {cores} cores, which is all that this process may use; lower --num-shard to "
            f"{cores}"
        )


def check_port(hostname: str, port: int, flag: str, address_flag: str = "--hostname") -> None:
    """Raises CannotStartError when `hostname` is not of this machine, or the port cannot be listened on.

    flag, address_flag: the flags that the user would change. Port 0 is not checked.
    """
    if port != 0:
        _bind(hostname, port, flag, address_flag)


def check_address(hostname: str, flag: str) -> None:
    """Raises CannotStartError when `hostname` is not an address of this machine."""
    _bind(hostname, 0, flag, flag)


def authority(host: str, port: int) -> str:
    """Returns host and port in the form that URLs have (RFC 3986)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(hostname: str, port: int, flag: str, address_flag: str) -> None:
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CannotStartError(
            f"{address_flag}: the host name {hostname} is not known; give an address of this machine"
        ) from error
    with socket.socket(family, kind, protocol) as probe, socket.socket(socket.AF_UNIX) as name:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            if sys.platform == "linux" and port:  # a router that loads has the port, and does not listen yet
                name.bind(port_name(str(address[0]), port))
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
