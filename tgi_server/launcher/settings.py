"""Settings of `text-generation-launcher`: what the router takes, what a shard takes, and the launcher's own."""

import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, PositiveInt, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from shared.settings import CommaSeparated, RefusedSetting
from tgi_server import demo_model
from tgi_server.router.settings import ServingSettings
from tgi_server.shard.settings import ModelSettings


def _chosen(address: str) -> str:
    """Refuses addresses for all interfaces: no key protects shards that listen for other machines."""
    try:
        everywhere = ipaddress.ip_address(address).is_unspecified
    except ValueError:  # a name
        everywhere = False
    if everywhere:
        raise ValueError("give one address of this machine, on a network that you trust, not all of them")
    return address


# SageMaker's variables, which stand for others. It counts the GPUs of a machine without any as 0.
_SAGEMAKER = {
    "hf_model_id": "model_id",
    "hf_model_revision": "revision",
    "hf_model_quantize": "quantize",
    "hf_model_trust_remote_code": "trust_remote_code",
    "sm_num_gpus": "num_shard",
}
_UNSET = (None, "", "0")


def _truth(value: object) -> object:
    """Returns true or false for the other ways to write them."""
    forms = {"true": "true", "1": "true", "false": "false", "0": "false"}
    return forms.get(value.lower(), value) if isinstance(value, str) else value


NO_NGROK = RefusedSetting("not supported; run ngrok beside the server: ngrok http PORT")

# The port that torch's own launchers take.
MEETING_PORT = 29500


class LauncherSettings(ServingSettings, ModelSettings):
    """Starts a text-generation server: shards that run the model, and a router that serves HTTP."""

    model_config = SettingsConfigDict(cli_shortcuts={"port": "p", "graceful-termination-timeout": "g", "env": "e"})
    help_groups: ClassVar[Mapping[str, str]] = {
        "model_id": "Model",
        "models": "Several models",
        "huggingface_hub_cache": "Model",
        "num_shard": "Shards",
        "num_nodes": "Several machines",
        "enable_prefill_logprobs": "Other",
        "otlp_service_name": "Logs and traces",
        "env": "Other",
    }

    model_id: str = Field(
        str(demo_model.PATH),
        description="a local folder or GGUF file, or an id of the hub; default: the bundled demo model",
    )
    models: CommaSeparated[str] = Field(
        [],
        description="several models in one server: MODEL,MODEL or NAME=MODEL,NAME=MODEL, or FILE.toml with a table; "
        "the `model` of a request chooses one; the first is the default",
    )
    models_memory: ByteSize | None = Field(
        None,
        gt=0,
        description="memory limit for the weights and KV caches of all models that are awake, on CPUs, such as 12GiB; "
        "default: 80 % of the available memory, after subtracting 0.75 GiB for each model",
    )
    huggingface_hub_cache: Path | None = Field(
        None, description="folder for downloads from the hub; default: the value of HF_HUB_CACHE"
    )
    num_shard: PositiveInt | None = Field(
        None,
        description="shards (processes) that run the model together, one for each GPU; with several machines: on each",
    )
    sharded: Annotated[Literal["true", "false"], BeforeValidator(_truth)] | None = Field(
        None, description="true: several shards, one for each visible GPU unless num-shard is given; false: one shard"
    )
    shard_uds_path: Path | None = Field(
        None, description="shards listen on the sockets PATH-0, PATH-1, ...; default: in a temporary folder"
    )
    master_addr: str = Field(
        "localhost", description="address where shards connect to each other; with several machines, that of node 0"
    )
    master_port: int | None = Field(
        None,
        gt=0,
        lt=65536,
        description="port where shards connect to each other; default: a free one; with several machines, 29500",
    )
    num_nodes: PositiveInt = Field(
        1, description="number of machines that run the model together, each with a launcher"
    )
    node_rank: int = Field(0, ge=0, description="number of this machine, from 0 to num-nodes - 1; node 0 serves HTTP")
    node_address: Annotated[str, AfterValidator(_chosen)] | None = Field(
        None, description="address at which the other machines reach this one"
    )
    enable_prefill_logprobs: bool = Field(
        False, description="accepted for TGI compatibility, no effect: prompt logprobs are always available"
    )
    otlp_service_name: str | None = Field(
        None, description="service name in traces; default: text-generation-inference.router, and .server for shards"
    )
    env: bool = Field(False, description="log what a bug report needs, then start; the variable ENV is not read")
    ngrok: Annotated[bool, NO_NGROK] = False
    ngrok_authtoken: Annotated[str | None, NO_NGROK] = None
    ngrok_edge: Annotated[str | None, NO_NGROK] = None
    weights_cache_override: Annotated[
        str | None, RefusedSetting("not supported; use the folder with the weights as the model id")
    ] = None

    @field_validator("hostname")
    @classmethod
    def _address(cls, hostname: str) -> str:
        """Ignores a container's name, which container engines put into HOSTNAME without meaning an address."""
        return "0.0.0.0" if hostname == socket.gethostname() else hostname

    @field_validator("port")
    @classmethod
    def _fixed(cls, port: int) -> int:
        if port == 0:
            raise ValueError("the launcher must know the port of the router; give one from 1 to 65535")
        return port

    @property
    def first_encoder(self) -> str | None:
        """Returns the embedding model, or else the rerank model; None if there is neither."""
        return self.embedding_model_id or self.rerank_model_id

    @property
    def generates(self) -> bool:
        """Returns False if only embedding and rerank models are served."""
        return self.model_id not in (self.embedding_model_id, self.rerank_model_id)

    @property
    def meeting_address(self) -> str:
        """Returns the address of node 0, where the launchers of several machines meet."""
        return self.node_address if self.node_rank == 0 and self.node_address else self.master_addr

    @property
    def meeting_port(self) -> int:
        return self.master_port or MEETING_PORT

    @model_validator(mode="after")
    def _has_models_for_its_memory(self) -> Self:
        if self.models_memory is not None and not self.models:
            raise ValueError("--models-memory needs --models; --cpu-memory is the memory for one model's KV cache")
        return self

    @model_validator(mode="after")
    def _knows_its_node(self) -> Self:
        if self.num_nodes == 1:
            if self.node_rank:
                raise ValueError(f"--node-rank is {self.node_rank}, so --num-nodes must be more than {self.node_rank}")
            return self
        if self.node_rank >= self.num_nodes:
            raise ValueError(
                f"--node-rank is {self.node_rank}; it must be less than --num-nodes, which is {self.num_nodes}"
            )
        if self.prefix_cache_disk is not None:
            raise ValueError("--prefix-cache-disk works on one machine only; leave it out with --num-nodes")
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
        """Ignores the variable ENV, which has other meanings on many machines: `--env` is a flag only.

        SageMaker's variables set the variables of TGI that are not set, as in TGI's container for it.
        """
        assert isinstance(env_settings, EnvSettingsSource)
        variables = {name: value for name, value in env_settings.env_vars.items() if name != "env"}
        sagemaker = {own: variables[name] for name, own in _SAGEMAKER.items() if variables.get(name) not in _UNSET}
        env_settings.env_vars = {**sagemaker, **{name: value for name, value in variables.items() if value}}
        return init_settings, env_settings
