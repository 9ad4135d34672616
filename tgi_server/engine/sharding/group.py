"""The shards of one model, and what they tell each other: NCCL on GPUs, shared memory and gloo on CPUs."""

import errno
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from tgi_server.engine.errors import CannotConnect, PeerLost, UnsupportedModel
from tgi_server.engine.sharding.shared_memory import SharedMemory, share_memory

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 120.0
"""How long shards wait for each other at start-up. Each has to import torch first."""
COLLECTIVE_SECONDS = 600.0
"""How long a shard waits for the others in a pass. One that has died is noticed at once; this is for one that hangs. It
has to be longer than shards are apart in loading.
"""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""They tell the libraries which network interface the other shards can reach."""


@dataclass(slots=True)
class Timing:
    """What collectives took, once `ShardGroup.timing` is set. On a GPU, that measures only their start."""

    seconds: float = 0.0
    calls: int = 0


class ShardGroup:
    """This process's place among the shards of one model: `rank` of `world_size`.

    All shards have to make the same calls in the same order; each call waits for the others. When one shard leaves
    that order, whatever the others compute is worthless: see `abandon`.
    """

    def __init__(self, rank: int, world_size: int, local_world_size: int, store: dist.Store) -> None:
        """local_world_size: how many of the shards run on this machine. store: holds what they tell each other."""
        self.rank = rank
        self.world_size = world_size
        self.local_world_size = local_world_size
        self.timing: Timing | None = None
        self.fault: str | None = None
        self._store = store
        self._questions = 0
        self._memory: SharedMemory | None = None

    def share_memory(self) -> None:
        """From here on, what is small goes through memory that all shards have; they have to be on one machine."""
        self._memory = share_memory(self.rank, self.world_size, self.ask, COLLECTIVE_SECONDS)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of every shard's tensor, all of one shape. `tensor` itself becomes it; it has to be contiguous."""
        started = time.perf_counter()
        if self._memory is not None and self._memory.fits(tensor):
            self._memory.all_reduce(tensor)
        else:
            with _peers_of(tensor):
                dist.all_reduce(tensor)
        self._count(started)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every shard's tensor, all of one shape, beside each other along the last axis, in the order of ranks."""
        started = time.perf_counter()
        tensor = tensor.contiguous()
        if self._memory is not None and self._memory.fits(tensor):
            gathered = self._memory.all_gather(tensor)
        else:
            parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
            with _peers_of(tensor):
                dist.all_gather(parts, tensor)
            gathered = torch.cat(parts, dim=-1)
        self._count(started)
        return gathered

    def minimum(self, number: int) -> int:
        """The smallest of every shard's number."""
        return min(int(answer) for answer in self.ask(str(number)))

    def ask(self, answer: str) -> list[str]:
        """What every shard answers, in the order of ranks. Takes milliseconds: for start-up, not for steps."""
        self._questions += 1
        keys = [f"answer/{self._questions}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], answer)
        self._store.wait(keys, timedelta(seconds=COLLECTIVE_SECONDS))
        return [self._store.get(key).decode() for key in keys]

    def check_same(self, facts: dict[str, str]) -> None:
        """Raises UnsupportedModel when a fact, by its name, is not the same for all shards."""
        for name, value in facts.items():
            for rank, other in enumerate(self.ask(value)):
                if other != value:
                    raise UnsupportedModel(
                        f"shard {self.rank} and shard {rank} differ in {name} ({_short(value)} here, {_short(other)} "
                        "there); start all shards with the same flags, files and versions"
                    )

    def abandon(self, fault: str) -> None:
        """Something went wrong in a pass. The others may be in another place of it, so none may be started again."""
        self.fault = self.fault or fault

    def check(self) -> None:
        """Raises RuntimeError once the group has been abandoned."""
        if self.fault is not None:
            raise RuntimeError(f"the shards are out of step: {self.fault}")

    def _count(self, started: float) -> None:
        if self.timing is not None:
            self.timing.seconds += time.perf_counter() - started
            self.timing.calls += 1


@contextmanager
def _peers_of(tensor: Tensor) -> Iterator[None]:
    """Raises PeerLost in place of gloo's own errors; NCCL's come later, and are those of the device."""
    try:
        yield
    except RuntimeError as error:
        if tensor.device.type == "cpu":
            raise PeerLost(str(error).splitlines()[0]) from error
        raise


def connect(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    *,
    device: torch.device,
    local_world_size: int | None = None,
    timeout: float = CONNECT_SECONDS,
) -> ShardGroup:
    """Meets the other shards where shard 0 listens, and shares this machine's cores among those that run on it.

    device: what this shard computes on. timeout: seconds. Raises CannotConnect.
    """
    local_world_size = local_world_size or world_size
    _share_cores(local_world_size)
    _choose_interface(master_addr, master_port)
    if rank == 0:
        logger.info("waiting for %d shards at %s:%d", world_size, master_addr, master_port)
    try:
        store = _store(rank, world_size, master_addr, master_port, timedelta(seconds=timeout))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise CannotConnect(_explain(error, rank, world_size, master_addr, master_port, timeout)) from error
    logger.info("shard %d of %d has met the others", rank, world_size)
    group = ShardGroup(rank, world_size, local_world_size, store)
    if device.type == "cpu" and local_world_size == world_size:
        group.share_memory()
    return group


def _store(rank: int, world_size: int, master_addr: str, master_port: int, timeout: timedelta) -> dist.TCPStore:
    """Shard 0 listens on this one address; left to itself, torch would listen on all that the machine has."""
    if rank != 0:
        return dist.TCPStore(master_addr, master_port, world_size, False, timeout)
    (family, *_, address), *_ = socket.getaddrinfo(master_addr, master_port, type=socket.SOCK_STREAM)
    listener = socket.create_server(address[:2], family=family)
    return dist.TCPStore(master_addr, master_port, world_size, True, timeout, master_listen_fd=listener.detach())


def _share_cores(processes: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // processes)))


def _choose_interface(master_addr: str, master_port: int) -> None:
    """By default gloo takes the address that the host's own name stands for, which others often cannot reach."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(master_addr, master_port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = ipaddress.ip_address(probe.getsockname()[0])
    except (OSError, ValueError):
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == family and each.address.partition("%")[0] == str(own) for each in addresses):
            for variable in INTERFACE_VARIABLES:
                os.environ.setdefault(variable, name)
            return


def _explain(error: Exception, rank: int, world_size: int, master_addr: str, master_port: int, timeout: float) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {master_port} is in use on {master_addr}; choose another with --master-port (or MASTER_PORT)"
    return (
        f"shard {rank} could not meet the {world_size - 1} others at {master_addr}:{master_port} within {timeout:g} s; "
        f"are all {world_size} started, and is that an address of shard 0 that this machine reaches? ({reason})"
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
