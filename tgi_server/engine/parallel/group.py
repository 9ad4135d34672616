"""The shards of one model, and their messages to each other: NCCL on GPUs, shared memory and gloo on CPUs."""

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from shared.control_groups import cores_of_affinity, usable_cores
from tgi_server.engine.errors import CannotConnect, EngineError, PeerLost, UnsupportedModel
from tgi_server.engine.memory import HOST
from tgi_server.engine.parallel import symmetric_memory
from tgi_server.engine.parallel.shared_memory import share_memory
from tgi_server.engine.parallel.symmetric_memory import SymmetricMemory

logger = logging.getLogger(__name__)

# Seconds that shards wait for each other at start-up. Each has to import torch first.
CONNECT_SECONDS = 120.0
# Seconds that a shard waits for the others in a pass. A lost peer is noticed at once; this is for one that hangs. It
# has to exceed the difference between the shards' loading times.
COLLECTIVE_SECONDS = 600.0
# Seconds that a shard with a fault waits for the others' reports. If none come, the others wait for this shard in the
# middle of a pass.
FAULT_SECONDS = 30.0
EARLY_CONNECTIONS = "NCCL_RUNTIME_CONNECT"
# Environment variables by which gloo and NCCL learn the network interface that the other shards can reach.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class ShardGroup:
    """The shards of one model, of which this process is `rank` of `world_size`.

    All shards have to make the same calls in the same order; each call waits for the others. When one shard leaves
    that order, whatever the others compute is worthless: see `abandon`.

    memory: the shared memory of shards on one machine, a `torch.classes.oatmill.Ranks`; None without shared memory.
    symmetric: the symmetric memory of GPUs, for small tensors; None if it is not used. fallback: the reason why NCCL is
    used although the user requested symmetric memory; None otherwise.
    """

    def __init__(
        self, rank: int, world_size: int, local_world_size: int, store: dist.Store, sharing_cores: int | None = None
    ) -> None:
        """local_world_size: number of shards on this machine. store: the key-value store that `exchange` uses.

        sharing_cores: number of shards that compute on the same cores as this one, itself included; None: all shards of
        this machine.
        """
        self.rank = rank
        self.world_size = world_size
        self.local_world_size = local_world_size
        self.sharing_cores = sharing_cores or local_world_size
        self.fault: str | None = None
        self._store = store
        self._exchanges = 0
        self.memory: Any = None
        self.symmetric: SymmetricMemory | None = None
        self.fallback: str | None = None

    def share_memory(self) -> None:
        """Sends small tensors through shared memory from now on. All shards have to be on one machine."""
        self.memory = share_memory(self.rank, self.world_size, self.exchange, COLLECTIVE_SECONDS)

    def share_gpu_memory(self, device: torch.device, *, requested: bool = True) -> None:
        """Sums small tensors through symmetric memory from now on, if all shards find its results correct.

        requested: True if the user asked for it; `fallback` then gives the reason if it is not used.
        """
        memory, apart = None, self.local_world_size < self.world_size
        fault = "the shards are on several machines" if apart else symmetric_memory.access_fault(device)
        if (fault := self._first_fault(fault)) is None:
            try:
                memory = SymmetricMemory(device)
            except Exception as error:  # of a driver
                fault = f"symmetric memory fails ({type(error).__name__}: {error})"
            fault = fault_of_any(fault, self)
        if memory is not None and fault is None:
            fault = fault_of_any(symmetric_memory.fault_of(memory, self.rank, device), self)
        if fault is None:
            self.symmetric = memory
            logger.info("small tensors are summed through memory that all GPUs read")
            return
        fallback = f"all-reduce is NCCL's, which is slower for small tensors: {fault}"
        if requested:
            self.fallback = fallback
        logger.log(logging.WARNING if requested else logging.INFO, fallback)

    def _first_fault(self, fault: str | None) -> str | None:
        """Returns the fault of the lowest rank that has one, or None. Used before the shards do something together."""
        return next(filter(None, self.exchange(fault or "")), None)

    def ranks(self) -> Any:
        """Returns the `torch.classes.oatmill.Ranks` with which kernels run their collectives."""
        if self.memory is not None:
            return self.memory
        name = dist.distributed_c10d._get_default_group().group_name
        return torch.classes.oatmill.Ranks.of_group(name, self.rank, self.world_size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums every shard's tensor, all of one shape, into `tensor`, which has to be contiguous. Returns it."""
        with _peers_of(tensor):
            if self.memory is not None:
                self.memory.all_reduce(tensor)
            elif self.symmetric is not None and self.symmetric.takes(tensor):
                self.symmetric.all_reduce(tensor)
            else:
                dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Joins every shard's tensor, all of one shape, along the last axis, in the order of ranks."""
        tensor = tensor.contiguous()
        with _peers_of(tensor):
            if self.memory is not None:
                joined: Tensor = self.memory.all_gather(tensor)
                return joined
            parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
            dist.all_gather(parts, tensor)
        return torch.cat(parts, dim=-1)

    def minimum(self, number: int) -> int:
        """Returns the smallest value that any shard passes."""
        return min(int(message) for message in self.exchange(str(number)))

    def exchange(self, message: str, seconds: float = COLLECTIVE_SECONDS) -> list[str]:
        """Returns every shard's message, in the order of ranks. Takes milliseconds: for start-up, not for steps.

        seconds: time-out of the wait for the others. Raises RuntimeError after it.
        """
        self._exchanges += 1
        keys = [f"message/{self._exchanges}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], message)
        self._store.wait(keys, timedelta(seconds=seconds))
        return [self._store.get(key).decode() for key in keys]

    def check_same(self, facts: dict[str, str]) -> None:
        """Raises UnsupportedModel if a value differs between shards. facts: names, for the error, and values."""
        for name, value in facts.items():
            for rank, other in enumerate(self.exchange(value)):
                if other != value:
                    raise UnsupportedModel(
                        f"shard {self.rank} and shard {rank} differ in {name} ({_short(value)} here, {_short(other)} "
                        "there); start all shards with the same flags, files and versions"
                    )

    def abandon(self, fault: str) -> None:
        """Makes `check` fail from now on: after a fault, the other shards may be at another point of the pass."""
        self.fault = self.fault or fault

    def check(self) -> None:
        """Raises RuntimeError once the group has been abandoned."""
        if self.fault is not None:
            raise RuntimeError(f"the shards are out of step: {self.fault}")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Checks the group, runs code that all shards run together, and abandons the group if the code fails.

        An EngineError does not count as such a failure: all shards raise it at the same point.
        """
        self.check()
        try:
            yield
        except EngineError:
            raise
        except BaseException as error:
            self.abandon(f"{type(error).__name__} in shard {self.rank}")
            raise


def fault_of_any(fault: str | None, group: ShardGroup | None) -> str | None:
    """Returns the fault of the lowest rank that has one, or None. Called after all shards tried something together.

    Raises PeerLost if this shard failed alone: the others wait for it in a collective that it never enters.
    """
    if group is None or not fault:
        faults = [fault] if group is None else group.exchange("")
        return next(filter(None, faults), None)
    try:
        return next(filter(None, group.exchange(fault, FAULT_SECONDS)))
    except RuntimeError as error:
        group.abandon(fault)
        raise PeerLost(f"shard {group.rank} failed while the others wait for it: {fault}") from error


@contextmanager
def peers() -> Iterator[None]:
    """Turns the error of a kernel that lost another shard while waiting for it into PeerLost."""
    try:
        yield
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        if line.startswith("peer lost"):
            raise PeerLost(line) from error
        raise


@contextmanager
def _peers_of(tensor: Tensor) -> Iterator[None]:
    """Turns errors of collectives on the CPU into PeerLost. NCCL reports its errors later, as errors of the device."""
    try:
        yield
    except RuntimeError as error:
        if tensor.device == HOST:
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
    sharing_cores: int | None = None,
    timeout: float = CONNECT_SECONDS,
    custom_kernels: bool = True,
    all_reduce: str = "auto",
) -> ShardGroup:
    """Connects to the other shards; shard 0 listens at `master_addr`:`master_port`.

    device: the device that this shard computes on. sharing_cores: as in `ShardGroup`. timeout: seconds. custom_kernels:
    False keeps to torch's collectives on CPUs. all_reduce: on GPUs, `symmetric-memory` sums small tensors through
    symmetric memory if a test finds it correct, and reports a fallback if not; `auto` does the same without the report;
    `nccl` never uses it.
    Raises CannotConnect.
    """
    local_world_size = local_world_size or world_size
    _choose_interface(master_addr, master_port)
    if rank == 0:
        logger.info("waiting for %d shards at %s:%d", world_size, master_addr, master_port)
    gpu = None if device == HOST else device
    if gpu is not None:
        # 0: NCCL connects for all its algorithms at once. It would otherwise take memory for one when a tensor of some
        # size comes for the first time, when the KV cache has the rest.
        os.environ.setdefault(EARLY_CONNECTIONS, "0")
    try:
        store = _store(rank, world_size, master_addr, master_port, timedelta(seconds=timeout))
        dist.init_process_group(
            "gloo" if gpu is None else "nccl",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            device_id=gpu,  # connects now
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise CannotConnect(_explain(error, rank, world_size, master_addr, master_port, timeout)) from error
    logger.info("shard %d of %d is connected to the others", rank, world_size)
    group = ShardGroup(rank, world_size, local_world_size, store, sharing_cores)
    if gpu is None and local_world_size == world_size and custom_kernels:
        group.share_memory()
    if gpu is not None and world_size > 1 and all_reduce != "nccl":
        group.share_gpu_memory(gpu, requested=all_reduce != "auto")
    return group


def _store(rank: int, world_size: int, master_addr: str, master_port: int, timeout: timedelta) -> dist.TCPStore:
    """Connects to shard 0. Shard 0 listens on this one address; torch's default is all addresses of the machine."""
    if rank != 0:
        return dist.TCPStore(master_addr, master_port, world_size, False, timeout)
    (family, *_, address), *_ = socket.getaddrinfo(master_addr, master_port, type=socket.SOCK_STREAM)
    listener = socket.create_server(address[:2], family=family)
    return dist.TCPStore(master_addr, master_port, world_size, True, timeout, master_listen_fd=listener.detach())


def share_cores(processes: int) -> None:
    """Limits torch's threads to this process's share of the cores, within a container's CPU quota.

    processes: number of processes that share the cores. If the user has set OMP_NUM_THREADS, the quota is ignored.
    """
    cores, there = usable_cores(), cores_of_affinity()
    if "OMP_NUM_THREADS" in os.environ:
        if processes == 1:
            return
        cores = there
    if cores < there:
        logger.info("control groups leave this process the time of %d of %d cores", cores, there)
    torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // processes)))


def _choose_interface(master_addr: str, master_port: int) -> None:
    """Sets the network interface of gloo and NCCL. Gloo's default, that of the host name, is often not reachable."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(master_addr, master_port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = ipaddress.ip_address(probe.getsockname()[0])
    except (OSError, ValueError):
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == family and address.address.partition("%")[0] == str(own) for address in addresses):
            for variable in INTERFACE_VARIABLES:
                os.environ.setdefault(variable, name)
            return


def _explain(error: Exception, rank: int, world_size: int, master_addr: str, master_port: int, timeout: float) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {master_port} is in use on {master_addr}; choose another with --master-port (or MASTER_PORT)"
    return (
        f"shard {rank} could not connect to the {world_size - 1} others at {master_addr}:{master_port} within "
        f"{timeout:g} s; are all {world_size} started, and is that an address of shard 0 that this machine reaches? "
        f"({reason})"
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
