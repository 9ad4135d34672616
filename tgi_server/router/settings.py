"""The router's settings: TGI's flags and environment variables."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AliasChoices,
    ByteSize,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import SettingsConfigDict

from shared.settings import CommaSeparated, LogLevel, Port, RefusedSetting, ServiceSettings, synonyms
from shared.user_cache import user_cache
from tgi_server.router.adapter_source import AdapterSources
from tgi_server.router.answers.formats import FORMAT_NAMES
from tgi_server.router.answers.reasoning import REASONING_NAMES

# The requests whose texts are remembered, to explain why prompts were not found in the prefix cache.
ExplainedMisses = Literal["own", "all", "off"]
ToolCallParser = Literal["auto", *FORMAT_NAMES]  # type: ignore[valid-type]
ReasoningParser = Literal["auto", "none", *REASONING_NAMES]  # type: ignore[valid-type]

# vLLM's names of these forms, where they differ.
_VLLM_PARSERS = {
    "openai": "harmony",
    "phi4_mini_json": "phi4_mini",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
}

# A number of tokens or sequences; messages to the shards have 32 bits for it.
Count = Annotated[int, Field(gt=0, lt=2**31)]
# More than a week, and few enough for the system's clocks of connections.
_MOST_SECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that callers may use, the weight of its share, and the lowest `priority` that it may give; None: that of
    all others.
    """

    text: str = field(repr=False)
    weight: float = 1.0
    max_priority: int | None = None


class RequestSettings(ServiceSettings):
    """Settings of what happens to a request between its arrival and its answer, which `oatmill.LLM` takes, too."""

    help_groups: ClassVar[Mapping[str, str]] = {
        "revision": "Model",
        "served_model_name": "Model",
        "tool_call_parser": "Chat",
        "max_concurrent_requests": "Limits of requests",
        "max_batch_prefill_tokens": "Batching and KV cache",
        "lora_adapters": "Adapters",
        "max_waiting_tokens": "Batching and KV cache",
        "max_client_batch_size": "Limits of requests",
        "validation_workers": "Batching and KV cache",
        "allowed_media_domains": "Limits of requests",
        "allow_special_tokens": "Chat",
        "disable_grammar_support": "Limits of requests",
        "max_priority": "Batching and KV cache",
    }

    revision: str | None = Field(
        default=None, description="Branch, tag or commit of the model on the hub; shown by /info."
    )
    served_model_name: CommaSeparated[str] = Field(
        default=[],
        description="Names of the model on OpenAI's routes; responses have the first. Default: the model's id on the "
        "hub, or the name of its folder.",
    )
    tokenizer_config_path: Path | None = Field(
        default=None, description="A tokenizer_config.json, or a bare chat template, instead of the model's own."
    )
    generation_config: Annotated[Literal["auto", "none"], synonyms({"vllm": "none"})] = Field(
        default="auto",
        description="auto: OpenAI's routes take sampling defaults from the model's generation_config.json; none, or "
        "vllm: they do not.",
    )
    tool_call_parser: Annotated[ToolCallParser, synonyms(_VLLM_PARSERS)] = Field(
        default="auto",
        description="Format in which the model calls tools; auto: read from its chat template. vLLM's names work for "
        "formats that are known here.",
    )
    reasoning_parser: ReasoningParser = Field(
        default="auto", description="How reasoning is separated from the answer; auto: read from the chat template."
    )
    disable_text_tool_calls: bool = Field(
        default=False,
        description="Do not parse an answer that consists only of the JSON of a tool call, bare or in a code fence, "
        "as that call, if the model calls tools in another format.",
    )
    max_concurrent_requests: Count | None = Field(
        default=None,
        description="Maximum number of requests in flight; others get 429. Default: max-batch-size, but at least 128.",
    )
    max_best_of: PositiveInt | None = Field(
        default=None, description="Largest value of best_of. Default: 2 in TGI's API, 128 in the others."
    )
    max_stop_sequences: NonNegativeInt | None = Field(
        default=None,
        description="Maximum number of stop sequences of a request. Default: 4 in TGI's API, 16 in the others.",
    )
    max_top_n_tokens: NonNegativeInt | None = Field(
        default=None,
        description="Largest value of top_n_tokens and top_logprobs. Default: 5 in TGI's API, 20 in the others.",
    )
    max_input_tokens: Count | None = Field(
        default=None,
        validation_alias=AliasChoices("max_input_tokens", "max_input_length"),
        description="Maximum number of tokens of a prompt. Default: one less than max-total-tokens.",
    )
    max_total_tokens: Count | None = Field(
        default=None,
        description="Maximum number of tokens of a prompt and its answer. Default: what model and memory allow.",
    )
    allow_long_context: bool = Field(
        default=False,
        description="Allow max-total-tokens beyond the context length of the model, where its output degrades.",
    )
    max_batch_prefill_tokens: Count | None = Field(
        default=None,
        description="Maximum number of prompt tokens in one step. Default: 4096; on GPUs what the GPU computes in "
        "0.25 s, from 2048 to 16384.",
    )
    max_batch_total_tokens: Count | None = Field(
        default=None,
        description="Maximum size of the KV cache in tokens, for all requests. Default: what the memory allows.",
    )
    prefix_caching: bool = Field(
        default=True, description="Reuse the KV cache of earlier prompts with the same prefix."
    )
    prefix_cache_disk: str | None = Field(
        default=None,
        description="SIZE or SIZE:FOLDER, such as 20GiB:/var/cache/oatmill: also store cached prefixes on disk, so "
        "that they outlive restarts. CPUs only. Servers on one machine may share the folder. Default: off; without "
        "FOLDER: ~/.cache/oatmill/prefixes.",
    )
    prefix_cache_disk_days: PositiveFloat = Field(
        default=30, description="Days after their last use after which prefixes on disk are deleted."
    )
    explain_misses: ExplainedMisses = Field(
        default="own",
        description="Explanations of prefix-cache misses. own: complete for requests with a `cache_salt` or one of "
        "several API keys, for others without positions and texts; all: complete for all requests, for users who may "
        "read each other's prompts; off: none.",
    )
    max_batch_size: Count | None = Field(
        default=None,
        description="Maximum number of requests in a batch. Default: max-concurrent-requests, if given; otherwise 128, "
        "on GPUs up to 512, by memory and speed.",
    )
    lora_adapters: AdapterSources = Field(
        default=[],
        description="LoRA adapters that requests may use: ID, ID=FOLDER, ID=FILE.gguf or ID=OWNER/NAME; adapters of "
        "the hub may have @REVISION.",
    )
    max_loras: Count = Field(
        default=32, description="Maximum number of adapters in memory; others are loaded when a request names them."
    )
    max_waiting_tokens: int = Field(
        default=20, ge=0, description="Decode steps after which waiting requests join the batch in any case."
    )
    waiting_served_ratio: float = Field(
        default=0.3, ge=0, description="Ratio of waiting to running requests from which the waiting ones join at once."
    )
    target_token_gap_ms: PositiveFloat | None = Field(
        default=None,
        description="Target inter-token latency in milliseconds, by which the chunks of prompts are sized. Default: "
        "three times a decode step, more if few requests run and many wait.",
    )
    max_client_batch_size: PositiveInt | None = Field(
        default=None,
        description="Maximum number of answers to one request: its prompts times n. Default: 128, and at most "
        "max-concurrent-requests.",
    )
    validation_workers: PositiveInt = Field(default=2, description="Threads that tokenize prompts.")
    allowed_media_domains: CommaSeparated[str] = Field(
        default=[],
        description="Hosts from which images of requests are fetched: HOST, *.DOMAIN for all below it, or HOST:PORT, "
        "which may be at a private address. Default: none; images come in the request.",
    )
    max_image_pixels: PositiveInt = Field(
        default=64_000_000, description="Maximum number of pixels of an image in a request."
    )
    allow_special_tokens: bool = Field(
        default=False,
        description="Treat special tokens spelled in chat messages as tokens, as TGI does, instead of as text.",
    )
    disable_grammar_support: bool = Field(default=False, description="Refuse requests with a grammar.")
    max_priority: int = Field(
        default=0, description="Smallest priority value that a request may set; smaller values are served first."
    )
    admission: Literal["time", "off"] = Field(
        default="time", description="time: requests that would surely miss their deadlines get 503 at once; off: never."
    )

    @field_validator("allowed_media_domains")
    @classmethod
    def _are_hosts(cls, entries: list[str]) -> list[str]:
        for entry in entries:
            if any(character in entry for character in "/@?# ") or not entry.strip("*."):
                raise ValueError(f"{entry!r} is not a host; write HOST, HOST:PORT, or *.DOMAIN for all hosts below it")
        return entries

    @field_validator("prefix_cache_disk")
    @classmethod
    def _has_a_size(cls, text: str | None) -> str | None:
        if text is not None:
            _read_disk(text)
        return text

    @property
    def prefix_disk(self) -> tuple[int, Path] | None:
        """Returns the bytes and the folder for cached prefixes on disk; None: they are not stored."""
        return None if self.prefix_cache_disk is None else _read_disk(self.prefix_cache_disk)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.prefix_cache_disk is not None and not self.prefix_caching:
            raise ValueError("--prefix-cache-disk needs the prefix cache; leave --no-prefix-caching out")
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
        return self


class ServingSettings(RequestSettings):
    """Settings that router and launcher both take; the launcher passes them on. Those here are of HTTP and callers."""

    model_config = SettingsConfigDict(cli_shortcuts={"port": "p", "graceful-termination-timeout": "g"})
    help_groups: ClassVar[Mapping[str, str]] = {
        "hostname": "HTTP server",
        "allow_adapter_updates": "Adapters",
        "enable_sleep_mode": "Other",
        "max_stored_responses": "Limits of requests",
        "payload_limit": "HTTP server",
        "enable_auto_tool_choice": "Chat",
        "api_key": "Access",
        "fairness": "Batching and KV cache",
        "cors_allow_origin": "Access",
        "json_output": "Logs and traces",
        "log_level": "Logs and traces",
        "graceful_termination_timeout": "HTTP server",
        "usage_stats": "Other",
    }

    hostname: str = Field(default="0.0.0.0", description="Address to listen on.")
    port: Port = Field(default=3000, description="Port of the HTTP API; with `oatmill serve` 8080.")
    prometheus_port: Port = Field(default=9000, description="Additional port for /metrics; 0: none.")
    allow_adapter_updates: bool = Field(
        default=False,
        description="Let callers with an API key load and unload adapters below adapter-root while the server runs.",
    )
    adapter_root: Path | None = Field(
        default=None, description="Folder from which adapters may be loaded while the server runs."
    )
    enable_sleep_mode: bool = Field(
        default=False, description="Let clients put the model to sleep (POST /sleep); the next request wakes it."
    )
    max_stored_responses: int = Field(
        default=1000, ge=0, description="Maximum number of stored responses (/v1/responses), in memory; 0: none."
    )
    payload_limit: PositiveInt | None = Field(
        default=None,
        description="Maximum size of a request body in bytes. Default: 2000000; for models that read images 32000000.",
    )
    client_timeout: PositiveInt = Field(
        default=75,
        le=_MOST_SECONDS,
        description="Time-out in seconds for a client to send a request, or to read its response.",
    )
    max_client_memory: PositiveInt = Field(
        default=1024, description="Memory limit in MiB for the requests of all clients and their unread responses."
    )
    max_connections: PositiveInt | None = Field(
        default=None, description="Maximum number of connections. Default: what the limit of open files allows."
    )
    max_connections_per_address: PositiveInt | None = Field(
        default=None,
        description="Maximum number of connections from one IP address, which may be a proxy's. Default: half of "
        "max-connections.",
    )
    enable_auto_tool_choice: Annotated[
        bool, RefusedSetting("tools that a request has may be called, unless its `tool_choice` is none", (True,))
    ] = Field(default=True, description="Accepted for vLLM compatibility, no effect: the model may always call tools.")
    strict_fields: bool = Field(
        default=False,
        description="Refuse unknown fields of requests. Default: they are ignored, and named in a header.",
    )
    api_key: str | None = Field(default=None, description="Key that requests must carry: Authorization: Bearer KEY.")
    api_key_file: Path | None = Field(
        default=None,
        description="File with one API key per line, each with its own prefix cache. A key may be followed by "
        "weight=NUMBER (for --fairness) and max-priority=NUMBER.",
    )
    fairness: Literal["none", "key"] = Field(
        default="none",
        description="key: API keys get equal shares of the tokens, or shares by their weights, however many requests "
        "each sends.",
    )
    cors_allow_origin: CommaSeparated[str] = Field(
        default=[], description="Origins of web pages that may call the server (CORS)."
    )
    allowed_hosts: CommaSeparated[str] = Field(
        default=[],
        description="Additional host names that browsers may use for a server without an API key; *.DOMAIN: all below "
        "it; *: any.",
    )
    json_output: bool = Field(default=False, description="Write log lines as JSON objects.")
    log_level: LogLevel = Field(
        default="INFO",
        description="Lowest severity to log: DEBUG, INFO, WARNING or ERROR, also by process, such as "
        "info,text_generation_router=debug. Prompts are never logged.",
    )
    otlp_endpoint: str | None = Field(default=None, description="OpenTelemetry collector (gRPC). Default: no tracing.")
    graceful_termination_timeout: float = Field(
        default=90, ge=0, le=_MOST_SECONDS, description="Seconds that running requests have to finish after SIGTERM."
    )
    usage_stats: Literal["on", "off", "no-stack"] = Field(
        default="off", description="Accepted for TGI compatibility, no effect: no usage statistics are ever sent."
    )

    @field_validator("api_key")
    @classmethod
    def _as_headers_have_it(cls, key: str | None) -> str | None:
        """Returns the key without surrounding white space, such as a mounted secret's line break, as headers do."""
        return key if key is None else key.strip()

    @field_validator("api_key_file")
    @classmethod
    def _has_keys(cls, file: Path | None) -> Path | None:
        if file is not None:
            _read_keys(file)
        return file

    @property
    def api_keys(self) -> list[ApiKey]:
        """The keys, one of which a request must have; empty: requests need none."""
        keys = _read_keys(self.api_key_file) if self.api_key_file else []
        own = [ApiKey(self.api_key)] if self.api_key and all(key.text != self.api_key for key in keys) else []
        return [*own, *keys]

    @model_validator(mode="after")
    def _callers_fit_together(self) -> Self:
        if self.prometheus_port and self.prometheus_port == self.port:
            raise ValueError(f"--port and --prometheus-port are both {self.port}")
        if self.adapter_root is not None and not self.allow_adapter_updates:
            raise ValueError("--adapter-root does nothing without --allow-adapter-updates; add that, or leave it out")
        if self.fairness == "key" and len(self.api_keys) < 2:
            raise ValueError("--fairness=key needs several keys to share among: give them with --api-key-file")
        if self.allow_adapter_updates and not (self.api_key or self.api_key_file):
            raise ValueError(
                "--allow-adapter-updates needs --api-key or --api-key-file: only clients with a key may update adapters"
            )
        if self.allow_adapter_updates and (self.adapter_root is None or not self.adapter_root.is_dir()):
            raise ValueError(
                "--allow-adapter-updates needs --adapter-root: the folder below which adapters may be loaded from, "
                f"not {self.adapter_root}"
            )
        return self


class PipelineSettings(RequestSettings):
    """Everything that the router's pipeline needs, without HTTP."""

    tokenizer_name: Path = Field(description="Folder of the model; its tokenizer files are read.")
    model_id: str | None = Field(
        default=None, description="Name of the model in responses. Default: as the shards report."
    )


class RouterSettings(ServingSettings, PipelineSettings):
    """HTTP front of a text-generation server: checks and queues requests, and drives the shards."""

    master_shard_uds_path: str = Field(
        default="/tmp/text-generation-server-0",  # noqa: S108  # TGI's default, which a shard has, too
        description="Socket of the first shard.",
    )
    ready_uds_path: Path | None = Field(
        default=None, description="Unix socket that the router opens once it is ready; the launcher waits for it."
    )
    models_file: Path | None = Field(
        default=None, description="The launcher's description of all models, if the server has several."
    )
    otlp_service_name: str = Field(default="text-generation-inference.router", description="Service name in traces.")


def _read_disk(text: str) -> tuple[int, Path]:
    """Returns size in bytes, and folder, of SIZE[:FOLDER]. Raises ValueError."""
    size, _, folder = text.partition(":")
    try:
        size_bytes = int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        size_bytes = 0
    if size_bytes <= 0:
        raise ValueError(f"{text!r} is not SIZE or SIZE:FOLDER with a size such as 20GiB")
    return size_bytes, Path(folder).expanduser() if folder else user_cache() / "prefixes"


def _read_keys(file: Path) -> list[ApiKey]:
    """Returns the keys of a file. Raises ValueError with one line that shows none of them."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"the file cannot be read: {reason}") from None
    keys = {key.text: key for number, line in enumerate(lines, 1) if line for key in [_read_key(number, line)]}
    if not keys:
        raise ValueError("the file has no keys; write one per line")
    return list(keys.values())


def _read_key(number: int, line: str) -> ApiKey:
    """Returns the key of a line, with the settings after it. Raises ValueError."""
    text, *words = line.split(" ")
    settings = dict(word.partition("=")[::2] for word in words if word)
    if not line.isprintable() or settings.keys() - {"weight", "max-priority"}:
        raise ValueError(
            f"line {number} of the file is not a key: a key has no spaces, and only weight=NUMBER and "
            "max-priority=NUMBER may follow it"
        )
    try:
        weight, priority = float(settings.get("weight", 1)), settings.get("max-priority")
        key = ApiKey(text, weight, None if priority is None else int(priority))
    except ValueError:
        raise ValueError(f"line {number} of the file: weight and max-priority are numbers") from None
    if not 0 < weight < inf:
        raise ValueError(f"line {number} of the file: the weight is {weight}; it must be more than 0")
    return key
