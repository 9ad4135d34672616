"""The command line `text-generation-launcher`."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shared.addresses import is_ip_address
from shared.gpus import has_gpu
from shared.logging import configure_logging
from shared.settings import fail, read_settings
from shared.stop_signals import ignore_stop_signals, on_stop_signal
from tgi_server.launcher import commands
from tgi_server.launcher.environment import describe_environment
from tgi_server.launcher.errors import CannotStartError, ModelMissingError, ProcessEndedError
from tgi_server.launcher.machine import (
    check_address,
    check_gpus,
    check_packages,
    check_port,
    check_shards,
    shard_count,
)
from tgi_server.launcher.model_table import ModelEntry, read_models, within_memory
from tgi_server.launcher.preflight import check_model, weight_bytes
from tgi_server.launcher.processes.groups import GroupSupervisor, ModelShards
from tgi_server.launcher.processes.sockets import shard_sockets
from tgi_server.launcher.processes.supervisor import Supervisor
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.launcher.weights import check_tokenizer, fetch_further_models, find_adapters, find_model, recognized

PROGRAM = "text-generation-launcher"
# Variables that TGI's server reads and this one ignores.
_NO_EFFECT = frozenset({"ATTENTION", "PREFILL_CHUNKING", "USE_PREFIX_CACHING", "FLASH_DECODING", "PAGED_KV"})
# Seconds by which log lines are delayed, so that lines of other processes with an earlier time can come first.
_ORDER_SECONDS = 0.2
# The default address of a server.
_EVERYWHERE = "0.0.0.0"
T = TypeVar("T")

logger = logging.getLogger(__name__)


def main(
    program: str = PROGRAM,
    arguments: Sequence[str] | None = None,
    on_ready: Callable[[LauncherSettings], None] | None = None,
) -> None:
    """Runs the launcher.

    program: the command that was typed, which begins messages. arguments: None: of the process. on_ready: called
    once, when HTTP is served on this machine.

    Exit codes: 0 stopped by a signal, 1 the server cannot start or has failed, 2 a mistake on the command line.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    settings = launcher_settings(program, arguments)
    configure_logging(
        "launcher", level=settings.log_level, json_output=settings.json_output, order_seconds=_ORDER_SECONDS
    )
    if settings.env:
        for line in describe_environment().splitlines():
            logger.info("%s", line)
    name = os.environ.get("HOSTNAME") or settings.hostname
    if settings.hostname == _EVERYWHERE != name and not _has_hostname(arguments):
        logger.warning(
            "the variable HOSTNAME is %r, which is not an address of this machine; listening on all addresses. "
            "--hostname chooses one",
            name,
        )
    logger.info("settings: %s", settings.describe())
    for variable in sorted(_NO_EFFECT & os.environ.keys()):
        logger.warning("the variable %s of TGI has no effect here", variable)
    if "cuda_memory_fraction" in settings.model_fields_set and not has_gpu():
        logger.warning("--cuda-memory-fraction has no effect on a CPU; --cpu-memory limits the KV cache there")
    if "model_id" not in settings.model_fields_set and settings.first_encoder is None and not settings.models:
        logger.warning(
            "no --model-id: serving the bundled demo model, 3.5 million parameters for first trials; "
            "--model-id OWNER/MODEL serves a real one"
        )
    try:
        asyncio.run(_launch(settings, on_ready))
    except ModelMissingError as error:
        sys.exit(error.status)
    except CannotStartError as error:
        fail(program, str(error), status=error.status)
    except ProcessEndedError as error:
        logger.error("%s; the server has stopped", error)
        sys.exit(error.status)
    logger.info("stopped")


def launcher_settings(program: str, arguments: Sequence[str]) -> LauncherSettings:
    """Returns the launcher's settings for some arguments. Raises SystemExit as `read_settings` does."""
    settings = read_settings(LauncherSettings, program, arguments)
    if "model_id" not in settings.model_fields_set and not settings.models and (encoder := settings.first_encoder):
        settings = settings.model_copy(update={"model_id": encoder})
    return settings if _has_hostname(arguments) else _with_address(settings)


def _has_hostname(arguments: Sequence[str]) -> bool:
    return any(argument.partition("=")[0] == "--hostname" for argument in arguments)


def _with_address(settings: LauncherSettings) -> LauncherSettings:
    """Returns settings that listen on all addresses where the variable HOSTNAME has a name that is not this machine's.

    Container engines and shells set it without meaning an address. TGI does the same.
    """
    if is_ip_address(settings.hostname):
        return settings  # if it is not this machine's, that is reported as for the flag
    try:
        check_address(settings.hostname, "--hostname")
    except CannotStartError:
        return settings.model_copy(update={"hostname": _EVERYWHERE})
    return settings


async def _launch(settings: LauncherSettings, on_ready: Callable[[LauncherSettings], None] | None) -> None:
    """Runs the server until a signal has stopped it. Raises LauncherError."""
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    check_packages()
    check_gpus()
    if settings.models:
        await _launch_several(settings, stop, on_ready)
        return
    _check_addresses(settings)
    prepared = await _prepared(settings, stop)
    if prepared is None:
        return
    settings, folder = prepared
    shards = shard_count(settings)
    peers = None
    if settings.num_nodes > 1:
        # Imports gRPC, which one machine alone does not need.
        from tgi_server.launcher.nodes.rendezvous import rendezvous

        peers = await _unless_stopped(rendezvous(settings, shards), stop)
        if peers is None:
            return
    first = settings.node_rank * shards
    with (
        shard_sockets(settings.shard_uds_path, range(first, first + shards)) as sockets,
        commands.settings_file(settings) as file,
    ):
        supervisor = Supervisor(
            commands.shards(settings, file, sockets, peers.store_port if peers else None),
            sockets,
            commands.router(settings, file, folder, sockets) if settings.node_rank == 0 else None,
            (settings.hostname, settings.port),
            settings.graceful_termination_timeout,
            peers,
            partial(on_ready, settings) if on_ready else None,
        )
        on_stop_signal(supervisor.stop)
        await supervisor.run()
    ignore_stop_signals()


async def _launch_several(
    settings: LauncherSettings, stop: asyncio.Event, on_ready: Callable[[LauncherSettings], None] | None
) -> None:
    """Runs a server of several models until a signal has stopped it. Raises LauncherError."""
    entries = read_models(settings)
    _check_addresses(settings)
    found: list[tuple[ModelEntry, Path]] = []
    for entry in entries:
        with _naming(entry.label):
            prepared = await _prepared(entry.settings, stop)
            if prepared is None:
                return
            own, folder = prepared
            found.append((replace(entry, settings=own, weight_bytes=weight_bytes(own, folder)), folder))
    entries, memory = within_memory([entry for entry, _ in found], settings.models_memory)
    with ExitStack() as opened:
        groups, described = [], []
        for number, (entry, (_, folder)) in enumerate(zip(entries, found, strict=True)):
            prefix = None if settings.shard_uds_path is None else Path(f"{settings.shard_uds_path}-{number}")
            sockets = opened.enter_context(shard_sockets(prefix, range(shard_count(entry.settings))))
            file = opened.enter_context(commands.settings_file(entry.settings))
            shards_of_it = commands.shards(entry.settings, file, sockets, label=entry.label)
            groups.append(ModelShards(entry.label, shards_of_it, sockets))
            described.append((entry, commands.router_arguments(entry.settings, file, folder, sockets)))
            if number == 0:
                first_file, control = file, sockets[0].with_name(f"{sockets[0].name}-control")
        models_file = opened.enter_context(commands.models_file(described, memory, control))
        first, first_folder = entries[0].settings, found[0][1]
        supervisor = GroupSupervisor(
            groups,
            commands.router(first, first_file, first_folder, list(groups[0].sockets), models_file),
            control,
            (settings.hostname, settings.port),
            settings.graceful_termination_timeout,
            partial(on_ready, first) if on_ready else None,
        )
        on_stop_signal(supervisor.stop)
        await supervisor.run()
    ignore_stop_signals()


@contextmanager
def _naming(label: str) -> Iterator[None]:
    """Adds to errors which of several models they are about."""
    try:
        yield
    except CannotStartError as error:
        raise CannotStartError(str(error) if label in str(error) else f"{label}: {error}") from None


async def _prepared(settings: LauncherSettings, stop: asyncio.Event) -> tuple[LauncherSettings, Path] | None:
    """Returns settings adapted to the kind of the model, and its folder, once all files are on this machine.

    Returns None if `stop` is set before. Raises LauncherError.
    """
    shards = shard_count(settings)
    check_shards(shards)
    _check_encoders(settings, shards)
    found = await _unless_stopped(_fetched(settings), stop)
    if found is None:
        return None
    settings, folder = found
    _check_encoders(settings, shards)
    check_model(settings, folder)
    return settings, folder


async def _fetched(settings: LauncherSettings) -> tuple[LauncherSettings, Path]:
    """Finds or downloads the model, its adapters and the models beside it. Raises LauncherError."""
    folder = await find_model(settings)
    check_tokenizer(folder)
    settings = recognized(settings, folder)
    await fetch_further_models(settings)
    found: dict[str, Any] = {"lora_adapters": await find_adapters(settings)}
    if settings.prefix_cache_disk is not None and not settings.generates:
        logger.info("--prefix-cache-disk has no effect on %s, which has no KV cache", settings.model_id)
        found["prefix_cache_disk"] = None
    return settings.model_copy(update=found), folder


def _check_encoders(settings: LauncherSettings, shards: int) -> None:
    """Raises CannotStartError when a model that does not generate is to run in several shards."""
    if not settings.generates and (shards > 1 or settings.num_nodes > 1):
        raise CannotStartError("embedding and rerank models run in one shard; leave --num-shard and --num-nodes out")


def _check_addresses(settings: LauncherSettings) -> None:
    """Raises CannotStartError when an address or a port of the settings cannot be used on this machine."""
    if settings.node_rank == 0:
        check_port(settings.hostname, settings.port, "--port")
        check_port(settings.hostname, settings.prometheus_port, "--prometheus-port")
    if settings.node_address is not None:
        check_address(settings.node_address, "--node-address")


async def _unless_stopped(work: Coroutine[None, None, T], stop: asyncio.Event) -> T | None:
    """Returns what `work` returns; None, with the work cancelled, when `stop` is set before."""
    tasks = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return None if tasks[0].cancelled() else tasks[0].result()


if __name__ == "__main__":
    main()
