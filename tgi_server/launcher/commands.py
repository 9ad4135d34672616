"""The command lines of the processes that the launcher starts, made of its own settings."""

import sys
from collections.abc import Iterable
from pathlib import Path

from tgi_server.launcher.preflight import free_port
from tgi_server.launcher.processes.child import Command
from tgi_server.launcher.settings import LauncherSettings

MODEL_FLAGS = ("revision", "trust_remote_code", "json_output")
SHARD_FLAGS = (
    *MODEL_FLAGS,
    "dtype",
    "cpu_memory",
    "cuda_memory_fraction",
    "cuda_graphs",
    "quantize",
    "linear_kernels",
    "disable_custom_kernels",
    "kv_cache_dtype",
    "speculate",
    "rope_scaling",
    "rope_factor",
    "lora_adapters",
    "watermark_gamma",
    "watermark_delta",
    "otlp_endpoint",
    "otlp_service_name",
)
ROUTER_FLAGS = (
    "revision",
    "json_output",
    "log_level",
    "hostname",
    "port",
    "prometheus_port",
    "validation_workers",
    "max_concurrent_requests",
    "max_best_of",
    "max_stop_sequences",
    "max_top_n_tokens",
    "max_input_tokens",
    "max_total_tokens",
    "waiting_served_ratio",
    "max_batch_prefill_tokens",
    "max_batch_total_tokens",
    "max_waiting_tokens",
    "max_batch_size",
    "max_client_batch_size",
    "payload_limit",
    "client_timeout",
    "max_connections",
    "max_connections_per_address",
    "tokenizer_config_path",
    "allow_special_tokens",
    "disable_grammar_support",
    "cors_allow_origin",
    "allowed_hosts",
    "api_key_file",
    "otlp_endpoint",
    "otlp_service_name",
    "graceful_termination_timeout",
)
"""Settings that a shard, or the router, has under the same name. The API key is not among them: see `router`."""


def download(settings: LauncherSettings) -> Command:
    """Prints the model's folder once it is complete."""
    arguments = ["download-weights", settings.model_id, *_flags(settings, MODEL_FLAGS)]
    arguments.append(f"--logger-level={settings.log_level}")
    return Command("download", _python("tgi_server.shard.cli", arguments), _hub_cache(settings))


def shards(settings: LauncherSettings, sockets: list[Path], store_port: int | None = None) -> list[Command]:
    """One for each socket of this machine. store_port: where the shards of several machines meet."""
    port = store_port or settings.master_port or free_port()
    return [_shard(settings, local_rank, sockets, port) for local_rank in range(len(sockets))]


def router(settings: LauncherSettings, folder: Path, sockets: list[Path]) -> Command:
    """Serves HTTP. The API key goes through the environment: a command line can be read by every user."""
    arguments = [*router_flags(settings, folder), f"--master-shard-uds-path={sockets[0]}"]
    environment = {"API_KEY": settings.api_key} if settings.api_key else {}
    return Command("router", _python("tgi_server.router.cli", arguments), environment)


def router_flags(settings: LauncherSettings, folder: Path) -> list[str]:
    return [*_flags(settings, ROUTER_FLAGS), f"--tokenizer-name={folder}"]


def address(settings: LauncherSettings) -> tuple[str, int]:
    """Where the router can be reached from this machine."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return loopback.get(settings.hostname, settings.hostname), settings.port


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
    }
    return Command(f"shard-{rank}", _python("tgi_server.shard.cli", arguments), environment)


def _python(module: str, arguments: Iterable[str]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _hub_cache(settings: LauncherSettings) -> dict[str, str]:
    return {"HF_HUB_CACHE": str(settings.huggingface_hub_cache)} if settings.huggingface_hub_cache else {}


def _flags(settings: LauncherSettings, names: Iterable[str]) -> list[str]:
    """`--name=value` for each setting that has a value.

    Those that are off are said to be off, for a variable in the environment that the child inherits may say otherwise.
    """
    flags = []
    for name in names:
        flag, value = name.replace("_", "-"), getattr(settings, name)
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags.append(f"--{flag}={','.join(map(str, value))}")
        elif value is not None:
            flags.append(f"--{flag}={value}")
    return flags
