"""Command lines of the processes that the launcher starts, made of its own settings."""

import sys
from collections.abc import Iterable
from pathlib import Path

from tgi_server.launcher.machine import free_port
from tgi_server.launcher.processes.child import Command
from tgi_server.launcher.processes.sockets import router_socket
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.adapter_source import AdapterSource
from tgi_server.router.settings import ServingSettings
from tgi_server.shard.settings import CheckpointSettings, ModelSettings

# Settings that are passed on under the same name. The API key is not: see `router`.
DOWNLOAD_FLAGS = tuple(CheckpointSettings.model_fields)
SHARD_FLAGS = (*ModelSettings.model_fields, "otlp_service_name")
ROUTER_FLAGS = (*(name for name in ServingSettings.model_fields if name != "api_key"), "otlp_service_name")
# Of these an adapter's command has its own.
_OF_THE_MODEL = ("revision",)


def download(settings: LauncherSettings, model_id: str) -> Command:
    """Returns the command that fetches a model, and prints its folder once it is complete."""
    if model_id != settings.model_id:
        settings = settings.model_copy(update={"revision": "main"})
    arguments = ["download-weights", model_id, "--merge-lora", *_flags(settings, DOWNLOAD_FLAGS)]
    arguments.append(f"--logger-level={settings.log_level}")
    return Command("download", _python("tgi_server.shard.cli", arguments), _hub_cache(settings))


def download_adapter(settings: LauncherSettings, adapter: AdapterSource) -> Command:
    """Returns the command that fetches an adapter, and prints its folder once it is complete."""
    flags = _flags(settings, (name for name in DOWNLOAD_FLAGS if name not in _OF_THE_MODEL))
    revision = [f"--revision={adapter.revision}"] if adapter.revision else []
    arguments = ["download-weights", adapter.place, "--no-merge-lora", *revision, *flags]
    arguments.append(f"--logger-level={settings.log_level}")
    # An inherited variable is of the model.
    return Command("download", _python("tgi_server.shard.cli", arguments), _hub_cache(settings) | {"REVISION": ""})


def shards(settings: LauncherSettings, sockets: list[Path], store_port: int | None = None) -> list[Command]:
    """Returns a command for each socket of this machine. store_port: where the shards of several machines meet."""
    port = store_port or settings.master_port or free_port()
    return [_shard(settings, local_rank, sockets, port) for local_rank in range(len(sockets))]


def router(settings: LauncherSettings, folder: Path, sockets: list[Path]) -> Command:
    """Returns the router's command. The API key is a variable: a command line can be read by every user."""
    arguments = _flags(settings, ROUTER_FLAGS)
    # The model is named, for an inherited MODEL_ID may be another one, which a flag of the launcher overrides.
    arguments += [f"--model-id={settings.model_id}", f"--tokenizer-name={folder}"]
    arguments.append(f"--master-shard-uds-path={sockets[0]}")
    arguments.append(f"--ready-uds-path={router_socket(sockets[0])}")
    environment = {"API_KEY": settings.api_key} if settings.api_key else {}
    return Command("router", _python("tgi_server.router.cli", arguments), environment)


def _shard(settings: LauncherSettings, local_rank: int, sockets: list[Path], master_port: int) -> Command:
    here = len(sockets)
    rank, world_size = settings.node_rank * here + local_rank, settings.num_nodes * here
    arguments = ["serve", settings.model_id, *_flags(settings, SHARD_FLAGS)]
    arguments.append(f"--logger-level={settings.log_level}")
    arguments.append(f"--uds-path={str(sockets[local_rank]).removesuffix(f'-{rank}')}")
    if world_size > 1:
        arguments.append("--sharded")
    if settings.node_rank > 0:
        arguments.append(f"--listen-address={settings.node_address}")
    environment = _hub_cache(settings) | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": settings.meeting_address,
        "MASTER_PORT": str(master_port),
        # An inherited one is meant for `llm-functionalities`: shards on the router's machine have no reason to listen.
        "LISTEN_ADDRESS": "",
    }
    return Command(f"shard-{rank}", _python("tgi_server.shard.cli", arguments), environment)


def _python(module: str, arguments: Iterable[str]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _hub_cache(settings: LauncherSettings) -> dict[str, str]:
    return {"HF_HUB_CACHE": str(settings.huggingface_hub_cache)} if settings.huggingface_hub_cache else {}


def _flags(settings: LauncherSettings, names: Iterable[str]) -> list[str]:
    """Returns `--name=value` for each setting that has a value.

    Those that are off are said to be off, for a variable in the environment that the child inherits may say otherwise.
    """
    flags = []
    for name in names:
        flag, value = name.replace("_", "-"), getattr(settings, name)
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list) and value:
            flags.append(f"--{flag}={','.join(map(str, value))}")
        elif value not in (None, []):
            flags.append(f"--{flag}={value}")
    return flags
