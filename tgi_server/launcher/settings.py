"""Settings of `text-generation-launcher`: TGI's, under TGI's names."""

import ipaddress
import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, AliasChoices, BeforeValidator, ByteSize, Field, NonNegativeInt, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from shared.settings import CommaSeparated, ServiceSettings
from tgi_server import demo_model


def _address(hostname: str) -> str:
    """Containers have their own name in HOSTNAME, which nobody meant as an address to listen on."""
    return "0.0.0.0" if hostname == socket.gethostname() else hostname


def _level(name: object) -> object:
    """TGI spells them `info` and `warn`."""
    return {"WARN": "WARNING"}.get(name.upper(), name.upper()) if isinstance(name, str) else name


def _chosen(address: str) -> str:
    """Shards on other machines are not protected by a key, so where they listen is not left to chance."""
    try:
        everywhere = ipaddress.ip_address(address).is_unspecified
    except ValueError:  # a name
        everywhere = False
    if everywhere:
        raise ValueError("give one address of this machine, on a network that you trust, not all of them")
    return address


LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_level)]
Port = Annotated[int, Field(gt=0, lt=65536)]
Count = Annotated[int, Field(gt=0)]
MEETING_PORT = 29500
"""That of torch's own launchers."""


class LauncherSettings(ServiceSettings):
    """Starts a text-generation server: shards that run the model, and a router that serves HTTP."""

    model_config = SettingsConfigDict(cli_shortcuts={"port": "p", "env": "e"})

    model_id: str = Field(str(demo_model.PATH), description="a local folder, or an id of the hub")
    revision: str | None = Field(None, description="branch, tag or commit of the model on the hub")
    dtype: Literal["float32", "float16", "bfloat16"] | None = Field(None, description="default: the checkpoint's")
    quantize: str | None = Field(None, description="int8: round the weights to 8 bits while loading, on a CPU")
    linear_kernels: str | None = Field(
        None,
        description="kernels of linear layers on a CPU, as the log tells them at load, such as fma or "
        "avx512_bf16,amx@16; default: those that are measured to be the fastest",
    )
    disable_custom_kernels: bool = Field(False, description="use only what torch and transformers have")
    trust_remote_code: bool = Field(False, description="run the Python code that comes with the model")
    huggingface_hub_cache: Path | None = Field(None, description="where downloads from the hub are kept")
    num_shard: Count | None = Field(
        None,
        description="processes that run the model together, one for each GPU; on each machine, if there are several",
    )
    sharded: Literal["true", "false"] | None = Field(
        None, description="whether there are several shards; without --num-shard, one for each GPU that is visible"
    )

    hostname: Annotated[str, AfterValidator(_address)] = Field("0.0.0.0", description="address to listen on")
    port: Port = 3000
    prometheus_port: int = Field(9000, ge=0, lt=65536, description="where /metrics is served, too; 0: nowhere")
    shard_uds_path: Path | None = Field(
        None, description="shards listen on the sockets PATH-0, PATH-1, ...; default: in a folder of their own"
    )
    master_addr: str = Field("localhost", description="where shards meet: with several machines, that of node 0")
    master_port: Port | None = Field(None, description="default: a free one; with several machines, 29500")
    num_nodes: Count = Field(1, description="machines that run the model together, each with a launcher")
    node_rank: int = Field(0, ge=0, description="which of them this is; node 0 serves HTTP")
    node_address: Annotated[str, AfterValidator(_chosen)] | None = Field(
        None, description="address of this machine at which the others reach it"
    )

    validation_workers: Count = Field(2, description="threads that turn text into tokens")
    max_concurrent_requests: Count = 128
    max_best_of: Count = 2
    max_stop_sequences: int = Field(4, ge=0)
    max_top_n_tokens: int = Field(5, ge=0)
    max_input_tokens: Count | None = Field(
        None, validation_alias=AliasChoices("max_input_tokens", "max_input_length"), description="of one prompt"
    )
    max_total_tokens: Count | None = Field(None, description="of one prompt and its answer")
    waiting_served_ratio: float = Field(0.3, ge=0)
    max_batch_prefill_tokens: Count | None = Field(None, description="prompt tokens that are computed in one step")
    max_batch_total_tokens: Count | None = Field(None, description="tokens of all running requests together")
    max_waiting_tokens: int = Field(20, ge=0, description="steps after which waiting requests are taken in")
    max_batch_size: Count | None = None
    max_client_batch_size: Count = 4
    payload_limit: Count = Field(2_000_000, description="of a request's body, in bytes")
    client_timeout: Count = Field(75, description="seconds that a client may take to ask, and to read")
    max_connections: Count | None = Field(None, description="default: as the limit of open files allows")
    max_connections_per_address: Count | None = Field(None, description="default: half of all")
    tokenizer_config_path: Path | None = Field(None, description="a tokenizer_config.json with a chat template")
    allow_special_tokens: bool = Field(False, description="also where chat messages spell them, as TGI does")
    disable_grammar_support: bool = False
    enable_prefill_logprobs: bool = Field(False, description="for TGI's sake: a prompt's logprobs can always be had")
    cors_allow_origin: CommaSeparated[str] | None = None
    allowed_hosts: CommaSeparated[str] | None = Field(
        None, description="names of this server, for when it listens on loopback without a key"
    )
    api_key: str | None = Field(None, description="generating then takes `Authorization: Bearer KEY`")
    api_key_file: Path | None = Field(None, description="a file of such keys, one a line")

    cuda_memory_fraction: float = Field(1.0, gt=0, le=1, description="share of a GPU's memory that may be used")
    cuda_graphs: CommaSeparated[NonNegativeInt] | None = Field(
        None, description="numbers of sequences to record CUDA graphs for; 0: none; default: a ladder up to 256"
    )
    cpu_memory: ByteSize | None = Field(
        None, gt=0, description="RAM for the KV cache on a CPU, such as 4GiB; default: a share of what is free"
    )
    watermark_gamma: float | None = Field(None, gt=0, lt=1, description="share of the vocabulary that it favours")
    watermark_delta: float | None = Field(None, ge=0, description="how much it favours it, added to the logits")
    graceful_termination_timeout: float = Field(90, ge=0, description="seconds for running requests after SIGTERM")

    json_output: bool = Field(False, description="log lines as JSON objects")
    log_level: LogLevel = "INFO"
    otlp_endpoint: str | None = Field(None, description="where OpenTelemetry spans go")
    otlp_service_name: str | None = Field(
        None, description="in traces; default: text-generation-inference.router, and .server for shards"
    )
    env: bool = Field(False, description="print what a bug report needs")

    # What follows is refused when set: see tgi_server/unsupported.py.
    speculate: int | None = None
    kv_cache_dtype: str | None = None
    rope_scaling: str | None = None
    rope_factor: float | None = None
    lora_adapters: str | None = None
    weights_cache_override: str | None = None
    usage_stats: str | None = None

    @property
    def meeting_address(self) -> str:
        """Of node 0, where the launchers of several machines meet."""
        return self.node_address if self.node_rank == 0 and self.node_address else self.master_addr

    @property
    def meeting_port(self) -> int:
        return self.master_port or MEETING_PORT

    @model_validator(mode="after")
    def _knows_its_node(self) -> Self:
        if self.num_nodes == 1:
            if self.node_rank:
                raise ValueError(f"--node-rank is {self.node_rank}, so --num-nodes must be more than {self.node_rank}")
            return self
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"--node-rank must be less than --num-nodes, which is {self.num_nodes}")
        if self.node_address is None:
            raise ValueError("--num-nodes needs --node-address: where the other machines reach this one")
        if self.node_rank and self.master_addr == "localhost":
            raise ValueError("--node-rank needs --master-addr: the --node-address of node 0")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`--env` is a flag only: on many machines a variable ENV says something else."""
        assert isinstance(env_settings, EnvSettingsSource)
        env_settings.env_vars = {name: value for name, value in env_settings.env_vars.items() if name != "env"}
        return init_settings, env_settings
