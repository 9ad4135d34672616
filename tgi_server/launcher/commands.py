"""Command lines of the processes that the launcher starts, and the file of its settings that shards and router read."""

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.addresses import free_port
from shared.settings import SECRETS
from tgi_server.launcher.model_table import ModelEntry
from tgi_server.launcher.processes.child import Command
from tgi_server.launcher.processes.sockets import router_socket
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.adapter_source import AdapterSource
from tgi_server.router.settings import ServingSettings
from tgi_server.shard.settings import ModelSettings

# Characters that the names of processes in the log do not have.
_NOT_IN_NAMES = re.compile(r"[^\w.-]+", re.ASCII)
# Settings that shards and router share with the launcher, but for secrets, which are variables.
SHARED = {*ServingSettings.model_fields, *ModelSettings.model_fields, "otlp_service_name"} - SECRETS


def shared_values(settings: LauncherSettings) -> dict[str, Any]:
    """Returns the settings for shards and router."""
    values = settings.model_dump(mode="json", include=SHARED, exclude_none=True)
    return values | {"logger_level": settings.log_level}


@contextmanager
def settings_file(settings: LauncherSettings) -> Iterator[Path]:
    """Yields a file with the settings for shards and router, which only this user can read."""
    with _json_file(shared_values(settings)) as file:
        yield file


@contextmanager
def _json_file(content: dict[str, Any]) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile("w", prefix="text-generation-launcher-", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        yield Path(file.name)


@contextmanager
def models_file(
    models: Sequence[tuple[ModelEntry, list[str]]], memory_bytes: int | None, control: Path
) -> Iterator[Path]:
    """Yields a file that describes several models to the router, which only this user can read.

    models: each with the router's arguments for it. memory_bytes: for all that are awake; None: no limit. control: the
    launcher's Unix socket.
    """
    described = [
        {
            "label": entry.label,
            "arguments": arguments,
            "pinned": entry.pinned,
            "idle_seconds": entry.idle_seconds,
            "priority": entry.priority,
            "bytes": entry.bytes,
            "task": entry.task,
        }
        for entry, arguments in models
    ]
    with _json_file({"memory_bytes": memory_bytes, "control": str(control), "models": described}) as file:
        yield file


def download(settings: LauncherSettings, model_id: str) -> Command:
    """Returns the command that fetches a model, and prints its folder once it is complete."""
    revision = settings.revision if model_id == settings.model_id else "main"
    own = settings if model_id == settings.model_id else None
    # Inherited variables are of the model.
    environment = _hub_cache(settings) | {
        "GGUF_FILE": (own and own.gguf_file) or "",
        "TOKENIZER_NAME": (own and own.tokenizer_name) or "",
    }
    return _download(settings, model_id, "--merge-lora", revision, environment)


def download_adapter(settings: LauncherSettings, adapter: AdapterSource) -> Command:
    """Returns the command that fetches an adapter, and prints its folder once it is complete."""
    # Inherited variables are of the model.
    environment = _hub_cache(settings) | {"REVISION": "", "GGUF_FILE": "", "TOKENIZER_NAME": ""}
    return _download(settings, adapter.place, "--no-merge-lora", adapter.revision, environment)


def _download(
    settings: LauncherSettings, place: str, merge: str, revision: str | None, environment: dict[str, str]
) -> Command:
    arguments = ["download-weights", place, merge, f"--logger-level={settings.log_level}"]
    arguments += [f"--revision={revision}"] if revision else []
    # Flags that are off are passed as off, because a variable that the child inherits may turn them on.
    arguments.append("--json-output" if settings.json_output else "--no-json-output")
    arguments.append("--trust-remote-code" if settings.trust_remote_code else "--no-trust-remote-code")
    return Command("download", _python("tgi_server.shard.cli", arguments), environment)


def shards(
    settings: LauncherSettings, file: Path, sockets: list[Path], store_port: int | None = None, label: str = ""
) -> list[Command]:
    """Returns a command for each socket of this machine.

    store_port: where the shards of several machines meet. label: of the model, where a server has several.
    """
    port = store_port or settings.master_port or free_port()
    return [_shard(settings, file, local_rank, sockets, port, label) for local_rank in range(len(sockets))]


def router(
    settings: LauncherSettings, file: Path, folder: Path, sockets: list[Path], models_file: Path | None = None
) -> Command:
    """Returns the router's command. The API key is a variable: a command line can be read by every user.

    models_file: describes all models, where there are several; the other arguments are of the first one.
    """
    arguments = router_arguments(settings, file, folder, sockets)
    arguments.append(f"--ready-uds-path={router_socket(sockets[0])}")
    arguments += [] if models_file is None else [f"--models-file={models_file}"]
    environment = {"API_KEY": settings.api_key} if settings.api_key else {}
    return Command("router", _python("tgi_server.router.cli", arguments), environment)


def router_arguments(settings: LauncherSettings, file: Path, folder: Path, sockets: list[Path]) -> list[str]:
    """Returns the router's arguments for a model."""
    # The model is passed, because an inherited MODEL_ID may name another one than the launcher's flag.
    arguments = [f"--settings-file={file}", f"--model-id={settings.model_id}", f"--tokenizer-name={folder}"]
    return [*arguments, f"--master-shard-uds-path={sockets[0]}"]


def _shard(
    settings: LauncherSettings, file: Path, local_rank: int, sockets: list[Path], master_port: int, label: str
) -> Command:
    here = len(sockets)
    rank, world_size = settings.node_rank * here + local_rank, settings.num_nodes * here
    arguments = ["serve", settings.model_id, f"--settings-file={file}"]
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
        # An inherited variable is for `llm-functionalities`: shards on the router's machine need not listen.
        "LISTEN_ADDRESS": "",
    }
    name = f"shard-{rank}"
    if label:
        name = _NOT_IN_NAMES.sub("-", f"{label}-{name}")
        arguments.append(f"--log-name={name}")
    return Command(name, _python("tgi_server.shard.cli", arguments), environment)


def _python(module: str, arguments: Iterable[str]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _hub_cache(settings: LauncherSettings) -> dict[str, str]:
    return {"HF_HUB_CACHE": str(settings.huggingface_hub_cache)} if settings.huggingface_hub_cache else {}
