"""The service's settings, from flags and the environment."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from llm_functionalities.endpoint.address import Address, parse_name_server
from shared.settings import CommaSeparated, LogLevel, Port, ServiceSettings


def _endpoint(text: str) -> str:
    return str(Address.parse(text))


def _name_server(text: str) -> str:
    parse_name_server(text)
    return text


# gRPC keeps milliseconds, and the sum of two of these, in 32 bits.
Seconds = Annotated[float, Field(gt=0, le=1_000_000)]
# gRPC keeps these in 32 bits, and those of calls with some added.
Places = Annotated[int, Field(gt=0, le=10**9)]
EndpointUrl = Annotated[str, AfterValidator(_endpoint)]
NameServer = Annotated[str, AfterValidator(_name_server)]
PromptEcho = Literal["object", "prompt", "none"]


class Settings(ServiceSettings):
    """The gRPC service that an assistant's other services call to reach a language model."""

    model_config = SettingsConfigDict(cli_shortcuts={"inference-endpoint-url": "endpoint"})

    listen_address: str = Field("0.0.0.0", description="address to listen on; [::] for IPv6 too")
    port: Port = Field(8000, description="port of the gRPC service; 0 picks a free one")
    metrics_port: Port | None = Field(None, description="port for Prometheus metrics over HTTP; unset: none")

    inference_endpoint_url: CommaSeparated[EndpointUrl] = Field(
        default=[], description="model servers, such as tgi:80 or https://host/path, separated by commas"
    )
    endpoint_token: Annotated[str, AfterValidator(str.strip)] | None = Field(
        None, description="bearer token for the model servers"
    )
    endpoint_ca: Path | None = Field(None, description="certificates (PEM) to check https:// model servers with")

    default_timeout: Seconds = Field(10.0, description="seconds for a call that sets no time-out of its own")
    max_timeout: Seconds = Field(300.0, description="most seconds for a call, whatever time-out it sets")
    max_tokens: Annotated[int, Field(gt=0)] = Field(128, description="tokens of an answer unless the call says")
    prompt_echo: PromptEcho = Field(
        "object",
        description="what answers repeat of prompts: a JSON object that the prompt leaves open, all of it, or nothing",
    )
    threads: Annotated[int, Field(gt=0)] = Field(64, description="requests to the model servers at a time")
    batch_threads: Annotated[int, Field(gt=0)] | None = Field(
        None, description="requests of batches among these at a time; unset: half of them"
    )
    max_concurrent_calls: Places = Field(
        512, description="calls at a time; those beyond it are refused with RESOURCE_EXHAUSTED"
    )
    max_batch_prompts: Annotated[int, Field(gt=0)] = Field(
        256, description="most prompts of a batch, and entries of any other list in a request"
    )
    max_message_bytes: Annotated[int, Field(gt=0, lt=2**31)] = Field(
        4 * 2**20, description="largest request and response"
    )
    max_connections: Places = Field(1024, description="connections of callers at a time")
    receive_timeout: Seconds = Field(20.0, description="seconds in which a call's request has to arrive")

    resolve_timeout: Seconds = Field(1.0, description="seconds in which a host name has to be resolved")
    connect_timeout: Seconds = Field(1.0, description="seconds in which a connection has to be made")
    connect_attempts: Annotated[int, Field(gt=0)] = Field(2, description="attempts to connect")
    retry_after: Seconds = Field(1.0, description="seconds between two looks at an endpoint that is away")
    failures_tolerated: Annotated[int, Field(gt=0)] = Field(5, description="failures in a row that mean it is away")
    name_servers: CommaSeparated[NameServer] = Field(
        default=[], description="name servers to ask in place of those in /etc/resolv.conf"
    )

    tls_cert: Path | None = Field(None, description="the service's certificate chain (PEM); turns TLS on")
    tls_key: Path | None = Field(None, description="its private key (PEM)")
    tls_client_ca: Path | None = Field(None, description="certificates (PEM) that callers are checked with: mutual TLS")
    keepalive_time: Seconds = Field(60.0, description="seconds of silence after which a caller's connection is pinged")
    grace: Seconds = Field(5.0, description="seconds that running calls get when the service stops")

    log_level: LogLevel = Field("INFO", description="least log level shown")
    json_output: bool = Field(False, description="log lines as JSON")
    otlp_endpoint: str | None = Field(None, description="OpenTelemetry collector (gRPC), such as http://otel:4317")
    otlp_service_name: str = Field("llm_functionalities", description="this service's name in traces")

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        for path in (self.tls_cert, self.tls_key, self.tls_client_ca, self.endpoint_ca):
            if path is not None and not path.is_file():
                raise ValueError(f"there is no file {path}")
        if self.default_timeout > self.max_timeout:
            raise ValueError("--default-timeout cannot be more than --max-timeout")
        if self.batch_threads is None:
            self.batch_threads = (self.threads + 1) // 2
        if self.batch_threads > self.threads:
            raise ValueError("--batch-threads cannot be more than --threads")
        return self
