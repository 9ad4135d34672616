"""The router's settings: TGI's flags and environment variables."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AliasChoices, Field, PositiveFloat, PositiveInt, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from shared.settings import CommaSeparated, Port, ServiceSettings
from tgi_server.router.adapter_source import AdapterSources

# `router/text/tool_formats.py` has these forms.
ToolCallParser = Literal[
    "auto",
    "tgi",
    "hermes",
    "qwen3_coder",
    "mistral",
    "mistral_args",
    "llama3_json",
    "deepseek_v3",
    "deepseek_v31",
    "functionary",
    "json",
]

# Tokens or sequences, of which messages to the shards hold no larger number.
Count = Annotated[int, Field(gt=0, lt=2**31)]
# More than a week, and few enough for the system's clocks of connections.
_MOST_SECONDS = 1_000_000


class ServingSettings(ServiceSettings):
    """Settings that router and launcher both take; the launcher passes them on."""

    model_config = SettingsConfigDict(cli_shortcuts={"port": "p", "graceful-termination-timeout": "g"})

    revision: str | None = Field(
        default=None, description="Branch, tag or commit of the model on the hub, which /info tells."
    )
    served_model_name: CommaSeparated[str] = Field(
        default=[], description="Names of the model on OpenAI's routes; answers have the first. Unset: the model id."
    )
    tokenizer_config_path: Path | None = Field(
        default=None, description="A tokenizer_config.json, or a bare chat template, in place of the model's own."
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="Whether OpenAI's routes take the defaults of sampling from the model's generation_config.json.",
    )
    tool_call_parser: ToolCallParser = Field(
        default="auto", description="Form in which the model calls tools; auto: as its chat template shows."
    )
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3"] = Field(
        default="auto", description="How the model's thoughts are told from its answer; auto: by its chat template."
    )
    hostname: str = Field(default="0.0.0.0", description="Address to listen on.")
    port: Port = Field(default=3000, description="Port of the HTTP API.")
    prometheus_port: Port = Field(default=9000, description="Port that answers /metrics too; 0: none.")
    max_concurrent_requests: Count = Field(default=128, description="Requests in flight; more are refused.")
    max_best_of: PositiveInt = Field(default=2, description="Largest best_of.")
    max_stop_sequences: int = Field(default=4, ge=0, description="Stop sequences of one request.")
    max_top_n_tokens: int = Field(default=5, ge=0, description="Most likely tokens reported at each position.")
    max_input_tokens: Count | None = Field(
        default=None,
        validation_alias=AliasChoices("max_input_tokens", "max_input_length"),
        description="Tokens of one prompt; unset: one less than max-total-tokens.",
    )
    max_total_tokens: Count | None = Field(
        default=None, description="Tokens of one prompt and its answer; unset: as the model and the memory allow."
    )
    allow_long_context: bool = Field(
        default=False,
        description="Allow max-total-tokens beyond the model's own context, where its texts get worse.",
    )
    max_batch_prefill_tokens: Count = Field(default=4096, description="Prompt tokens computed in one step.")
    max_batch_total_tokens: Count | None = Field(
        default=None, description="Tokens of all running requests; unset: as the memory allows."
    )
    prefix_caching: bool = Field(
        default=True, description="Keep what is computed for a prompt, for others that begin with the same tokens."
    )
    max_batch_size: Count | None = Field(
        default=None, description="Requests that run at once; unset: max-concurrent-requests."
    )
    lora_adapters: AdapterSources = Field(
        default=[],
        description="Adapters that requests may name: ID, ID=FOLDER or ID=OWNER/NAME, with @REVISION on the hub.",
    )
    allow_adapter_updates: bool = Field(
        default=False, description="Whoever has an API key may load and unload adapters, from below adapter-root."
    )
    adapter_root: Path | None = Field(default=None, description="Folder below which adapters may be loaded from.")
    max_loras: Count = Field(
        default=32, description="Adapters that are held ready at once; others are read again when they are asked for."
    )
    max_waiting_tokens: int = Field(default=20, ge=0, description="Decode steps before waiting requests are taken in.")
    waiting_served_ratio: float = Field(
        default=0.3, ge=0, description="Waiting requests for each running one that are taken in at once."
    )
    target_token_gap_ms: PositiveFloat | None = Field(
        default=None,
        description="Milliseconds between two tokens of a reply, for whose sake the prompts of others are computed in "
        "parts; unset: three times as long as a step without prompts, more if few replies run and many wait.",
    )
    max_client_batch_size: PositiveInt = Field(default=4, description="Prompts of one request, times n.")
    max_stored_responses: int = Field(
        default=1000, ge=0, description="Responses of /v1/responses that are kept in memory; 0: none."
    )
    validation_workers: PositiveInt = Field(default=2, description="Threads that tokenise.")
    payload_limit: PositiveInt = Field(default=2_000_000, description="Bytes of a request's body.")
    client_timeout: PositiveInt = Field(
        default=75,
        le=_MOST_SECONDS,
        description="Seconds that a client may take to send a request, and to take what it is sent.",
    )
    max_connections: PositiveInt | None = Field(
        default=None, description="Connections of all clients; unset: as the limit of open files allows."
    )
    max_connections_per_address: PositiveInt | None = Field(
        default=None, description="Connections of one address, which may be a proxy's; unset: half of all."
    )
    allow_special_tokens: bool = Field(
        default=False, description="Take special tokens that chat messages spell as such, as TGI does, not as text."
    )
    disable_grammar_support: bool = Field(default=False, description="Refuse requests with a grammar.")
    api_key: str | None = Field(default=None, description="Requests must carry it: Authorization: Bearer KEY.")
    api_key_file: Path | None = Field(
        default=None, description="A file of API keys, one a line; each has a prefix cache of its own."
    )
    cors_allow_origin: CommaSeparated[str] = Field(default=[], description="Origins that browsers may call from.")
    allowed_hosts: CommaSeparated[str] = Field(
        default=[], description="Names of this server, for when it listens on loopback without a key; *: any."
    )
    json_output: bool = Field(default=False, description="Log lines as JSON.")
    log_level: str = Field(default="INFO", description="Least severity of log lines; prompts are logged by none.")
    otlp_endpoint: str | None = Field(default=None, description="OpenTelemetry collector (gRPC); unset: no tracing.")
    graceful_termination_timeout: float = Field(
        default=90, ge=0, le=_MOST_SECONDS, description="Seconds that running requests have left after SIGTERM."
    )
    usage_stats: Literal["on", "off", "no-stack"] = Field(
        default="off", description="For TGI's sake: no usage statistics are sent to anyone."
    )

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError("must be DEBUG, INFO, WARNING or ERROR")
        return value.upper()

    @field_validator("api_key")
    @classmethod
    def _as_headers_have_it(cls, key: str | None) -> str | None:
        """Returns the key without white space around it, such as the line's end of a mounted secret: none is sent."""
        return key if key is None else key.strip()

    @field_validator("api_key_file")
    @classmethod
    def _has_keys(cls, file: Path | None) -> Path | None:
        if file is not None:
            _read_keys(file)
        return file

    @property
    def api_keys(self) -> list[str]:
        """Keys of which a request must carry one; none: it need not."""
        keys = [self.api_key] if self.api_key else []
        return list(dict.fromkeys([*keys, *(_read_keys(self.api_key_file) if self.api_key_file else ())]))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_input_tokens and self.max_total_tokens and self.max_input_tokens >= self.max_total_tokens:
            raise ValueError(
                f"--max-input-tokens ({self.max_input_tokens}) must be less than "
                f"--max-total-tokens ({self.max_total_tokens})"
            )
        if self.max_batch_total_tokens and self.max_batch_total_tokens < (self.max_total_tokens or 0):
            raise ValueError(
                f"--max-batch-total-tokens ({self.max_batch_total_tokens}) must be at least "
                f"--max-total-tokens ({self.max_total_tokens})"
            )
        if self.prometheus_port and self.prometheus_port == self.port:
            raise ValueError(f"--port and --prometheus-port are both {self.port}")
        if self.adapter_root is not None and not self.allow_adapter_updates:
            raise ValueError("--adapter-root does nothing without --allow-adapter-updates; add that, or leave it out")
        if self.allow_adapter_updates and not (self.api_key or self.api_key_file):
            raise ValueError("--allow-adapter-updates needs --api-key or --api-key-file: who has a key may update")
        if self.allow_adapter_updates and (self.adapter_root is None or not self.adapter_root.is_dir()):
            raise ValueError(
                "--allow-adapter-updates needs --adapter-root: the folder below which adapters may be loaded from, "
                f"not {self.adapter_root}"
            )
        return self


class RouterSettings(ServingSettings):
    """HTTP front of a text-generation server: checks and queues requests, and drives the shards."""

    tokenizer_name: Path = Field(description="Folder of the model; its tokenizer files are read.")
    model_id: str | None = Field(default=None, description="Name of the model in answers; default: as the shards say.")
    master_shard_uds_path: str = Field(
        default="/tmp/text-generation-server-0",  # noqa: S108  # TGI's default, which a shard has, too
        description="Socket of the first shard.",
    )
    ready_uds_path: Path | None = Field(
        default=None, description="A Unix socket that listens once the router serves: its launcher looks there."
    )
    otlp_service_name: str = Field(default="text-generation-inference.router", description="Name in traces.")


def _read_keys(file: Path) -> list[str]:
    """Returns the keys of a file. Raises ValueError with one line that tells none of them."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"the file cannot be read: {reason}") from None
    for number, line in enumerate(lines, 1):
        if " " in line or not line.isprintable():
            raise ValueError(f"line {number} of the file is no key: a key has no spaces")
    keys = [line for line in lines if line]
    if not keys:
        raise ValueError("the file has no keys; it wants one a line")
    return keys
