"""The service's settings, from flags and the environment."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from llm_functionalities.endpoint.address import Address, parse_name_server
from shared.settings import CommaSeparated, LogLevel, Port, ServiceSettings


def _endpoint(text: str) -> str:
    return str(Address.parse(text))


def _name_server(text: str) -> str:
    parse_name_server(text)
    return text


def _hedge_after(text: str) -> str:
    try:
        valid = text == "p95" or 0 < float(text) <= MOST_MILLISECONDS
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"give milliseconds, at most {MOST_MILLISECONDS}, or p95")
    return text


def _model_endpoint(text: str) -> str:
    name, equals, place = text.partition("=")
    if not equals or not place:
        raise ValueError(f"{text!r} is not a model; give NAME=ENDPOINT, or NAME=ENDPOINT#MODEL")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name; use letters, digits, and any of . _ / : -")
    url, sharp, model = place.partition("#")
    if sharp and not model:
        raise ValueError(f"{text!r} names no model after the #")
    return f"{name}={_endpoint(url)}{sharp}{model}"


_NAME = re.compile(r"[A-Za-z0-9._/:-]{1,100}")
MOST_MILLISECONDS = 1_000_000_000
# gRPC keeps milliseconds, and the sum of two of these, in 32 bits.
Seconds = Annotated[float, Field(gt=0, le=1_000_000)]
# gRPC keeps these in 32 bits, and limits of calls with some added.
Places = Annotated[int, Field(gt=0, le=10**9)]
EndpointUrl = Annotated[str, AfterValidator(_endpoint)]
ModelEndpoint = Annotated[str, AfterValidator(_model_endpoint)]
NameServer = Annotated[str, AfterValidator(_name_server)]
PromptEcho = Literal["object", "prompt", "none"]


class Settings(ServiceSettings):
    """The gRPC service that an assistant's other services call to reach a language model."""

    model_config = SettingsConfigDict(cli_shortcuts={"inference-endpoint-url": "endpoint"})
    help_groups: ClassVar[Mapping[str, str]] = {
        "listen_address": "gRPC server",
        "inference_endpoint_url": "Model servers",
        "default_timeout": "Calls",
        "threads": "Limits",
        "resolve_timeout": "Connections to model servers",
        "tls_cert": "TLS",
        "keepalive_time": "gRPC server",
        "log_level": "Logs and traces",
    }

    listen_address: str = Field("0.0.0.0", description="address to listen on; [::] for IPv6 too")
    port: Port = Field(8000, description="port of the gRPC service; 0 picks a free one")
    metrics_port: Port | None = Field(None, description="port for Prometheus metrics over HTTP; unset: none")

    inference_endpoint_url: CommaSeparated[EndpointUrl] = Field(
        default=[], description="model servers, such as tgi:80 or https://host/path, separated by commas"
    )
    endpoint_token: Annotated[str, AfterValidator(str.strip)] | None = Field(
        None, description="bearer token for the model servers"
    )
    endpoint_ca: Path | None = Field(None, description="CA certificates (PEM) that verify https:// model servers")

    fallback_endpoint: EndpointUrl | None = Field(
        None, description="model server for requests that no other one accepts, for instance with a smaller model"
    )
    ladder_models: CommaSeparated[ModelEndpoint] = Field(
        default=[],
        description="names of models and their servers: NAME=ENDPOINT, or NAME=ENDPOINT#MODEL for one of several "
        "models of a server; a name that is given twice has two servers",
    )
    ladder: CommaSeparated[str] = Field(
        default=[],
        description="models for calls that list none, from the largest to the smallest; a call uses the largest one "
        "that is predicted to meet its deadline",
    )
    hedge_after_ms: Annotated[str, AfterValidator(_hedge_after)] | None = Field(
        None,
        description="milliseconds after which an unanswered request is also sent to a second model server, or p95: the "
        "95th percentile of recent latencies; the first answer is used. Default: never",
    )
    hedge_budget: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="maximum share of requests that are sent a second time"
    )

    default_timeout: Seconds = Field(10.0, description="time-out in seconds of calls that set none")
    max_timeout: Seconds = Field(
        300.0, description="maximum time-out of a call in seconds; longer ones are reduced to this"
    )
    max_tokens: Annotated[int, Field(gt=0)] = Field(
        128, description="maximum number of tokens of an answer, for calls without max_tokens"
    )
    prompt_echo: PromptEcho = Field(
        "object",
        description="part of the prompt that is put before the answer; object: the unfinished JSON object at the end "
        "of the prompt; prompt: the whole prompt; none: nothing",
    )
    threads: Annotated[int, Field(gt=0)] = Field(
        64, description="maximum number of concurrent requests to the model servers"
    )
    batch_threads: Annotated[int, Field(gt=0)] | None = Field(
        None, description="maximum number of threads used by batches; default: half of threads"
    )
    max_concurrent_calls: Places = Field(
        512, description="maximum number of concurrent calls; others get RESOURCE_EXHAUSTED"
    )
    max_batch_prompts: Annotated[int, Field(gt=0)] = Field(
        256, description="maximum number of prompts in a batch, and of entries in any other list of a request"
    )
    max_message_bytes: Annotated[int, Field(gt=0, lt=2**31)] = Field(
        4 * 2**20, description="maximum size of a request or response message in bytes"
    )
    max_connections: Places = Field(1024, description="maximum number of connections from callers")
    receive_timeout: Seconds = Field(20.0, description="seconds within which a call's request must arrive")

    resolve_timeout: Seconds = Field(1.0, description="seconds to resolve a host name")
    connect_timeout: Seconds = Field(1.0, description="seconds to connect")
    connect_attempts: Annotated[int, Field(gt=0)] = Field(2, description="attempts to connect to an endpoint")
    retry_after: Seconds = Field(1.0, description="seconds between two health checks of an unavailable endpoint")
    failures_tolerated: Annotated[int, Field(gt=0)] = Field(
        5, description="consecutive failures after which an endpoint counts as unavailable"
    )
    name_servers: CommaSeparated[NameServer] = Field(
        default=[], description="DNS servers to use instead of those in /etc/resolv.conf"
    )

    tls_cert: Path | None = Field(None, description="the service's certificate chain (PEM); turns TLS on")
    tls_key: Path | None = Field(None, description="private key of the certificate (PEM)")
    tls_client_ca: Path | None = Field(None, description="CA certificates (PEM) that verify callers: mutual TLS")
    keepalive_time: Seconds = Field(
        60.0, description="seconds without traffic after which a caller's connection is pinged"
    )
    grace: Seconds = Field(5.0, description="seconds that running calls have to finish after SIGTERM")

    log_level: LogLevel = Field("INFO", description="lowest severity to log: DEBUG, INFO, WARNING or ERROR")
    json_output: bool = Field(False, description="write log lines as JSON objects")
    otlp_endpoint: str | None = Field(None, description="OpenTelemetry collector (gRPC), such as http://otel:4317")
    otlp_service_name: str = Field("llm_functionalities", description="this service's name in traces")

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        if self.port and self.port == self.metrics_port:
            raise ValueError(f"--port and --metrics-port are both {self.port}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        for path in (self.tls_cert, self.tls_key, self.tls_client_ca, self.endpoint_ca):
            if path is not None and not path.is_file():
                raise ValueError(f"there is no file {path}")
        if self.fallback_endpoint in self.inference_endpoint_url:
            raise ValueError(f"--fallback-endpoint is one of the model servers: {self.fallback_endpoint}")
        known = dict.fromkeys(each.partition("=")[0] for each in self.ladder_models)
        if unknown := [name for name in self.ladder if name not in known]:
            raise ValueError(
                f"--ladder names {unknown[0]!r}, which is not a name in --ladder-models: {', '.join(known)}"
            )
        if len(set(self.ladder)) < len(self.ladder):
            raise ValueError(f"--ladder names a model twice: {', '.join(self.ladder)}")
        if len(set(self.ladder_models)) < len(self.ladder_models):
            raise ValueError(f"--ladder-models has the same entry twice: {', '.join(self.ladder_models)}")
        if self.default_timeout > self.max_timeout:
            raise ValueError("--default-timeout cannot be more than --max-timeout")
        if self.batch_threads is None:
            self.batch_threads = (self.threads + 1) // 2
        if self.batch_threads > self.threads:
            raise ValueError("--batch-threads cannot be more than --threads")
        return self
