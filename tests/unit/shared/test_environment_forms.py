"""Every setting is taken from the environment in each form that TGI documents."""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import ByteSize

from llm_functionalities.settings import Settings
from shared.settings import RefusedSetting, ServiceSettings, read_settings
from tgi_server.benchmark.settings import BenchmarkSettings
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.adapter_source import AdapterSource
from tgi_server.router.settings import RouterSettings
from tgi_server.shard.settings import DownloadSettings, QuantizeSettings, ShardSettings

# Of each program the flags that it needs.
PROGRAMS: dict[type[ServiceSettings], list[str]] = {
    LauncherSettings: [],
    RouterSettings: ["--tokenizer-name=/model"],
    ShardSettings: ["--sharded"],
    DownloadSettings: [],
    QuantizeSettings: ["model", "/out"],
    BenchmarkSettings: ["--tokenizer-name=/model"],
    Settings: [],
}
TRUTHS = {"true": True, "True": True, "1": True, "false": False, "FALSE": False, "0": False}
# Lists, with one item as with several.
NUMBERS = {"8": [8], "1,2,4": [1, 2, 4], "1, 2 ,4,": [1, 2, 4]}
TEXTS = {"a": ["a"], "1": ["1"], "https://a,b.c": ["https://a", "b.c"]}
ADAPTERS = {"a/b": [AdapterSource("a/b", "a/b")], "a,b=c/d": [AdapterSource("a", "a"), AdapterSource("b", "c/d")]}
# Settings with forms of their own.
OWN: dict[str, dict[str, Any]] = {
    "inference_endpoint_url": {"tgi:80": ["http://tgi:80"], "http://a:1,b:2": ["http://a:1", "http://b:2"]},
    "name_servers": {"10.0.0.1": ["10.0.0.1"], "10.0.0.1,10.0.0.2:53": ["10.0.0.1", "10.0.0.2:53"]},
    "log_level": {
        "warn": "WARNING",
        "INFO": "INFO",
        "debug": "DEBUG",
        "off": "OFF",
        "info,text_generation_router=debug": "INFO,text_generation_router=DEBUG",
    },
    "logger_level": {"INFO": "INFO", "info": "INFO", "CRITICAL": "CRITICAL"},
    "prefix_cache_disk": {"20GiB": "20GiB", "1MB:/a": "1MB:/a"},
    "cuda_graphs": {"0": [0], **NUMBERS},
    "max_timeout": {"300.5": 300.5},
    "enable_auto_tool_choice": {"true": True, "1": True},
    "sharded": {"true": "true", "1": "true", "False": "false", "0": "false"},
    "node_address": {"10.0.0.2": "10.0.0.2"},
    "cpu_memory": {"4GiB": 4 << 30, "1000": 1000},
    "groupsize": {"-1": -1, "64": 64},
    "bits": {"4": 4, "8": 8},
    "quantize": {name: name for name in ("bitsandbytes", "bitsandbytes-nf4", "gptq", "awq", "eetq", "fp8", "marlin")},
    "hostname": {"::": "::"},
    "fallback_endpoint": {"a": "http://a:80", "https://a.b:1": "https://a.b:1"},
    "ladder_models": {
        "a=b": ["a=http://b:80"],
        "a=https://b.c:1#d, e=f:2": ["a=https://b.c:1#d", "e=http://f:2"],
    },
    "hedge_after_ms": {"250": "250", "p95": "p95"},
    "allowed_media_domains": {"a.b": ["a.b"], "*.a.b, c:80": ["*.a.b", "c:80"]},
}
# They are taken together with others only, of which their programs' tests are.
BESIDE_OTHERS = {
    "adapter_root", "allow_adapter_updates", "api_key_file", "endpoint_ca", "fairness", "ladder", "local_world_size",
    "node_rank", "num_nodes", "output", "rank", "tls_cert", "tls_client_ca", "tls_key",
}  # fmt: skip


def kinds(annotation: Any) -> list[Any]:
    """Returns the types that a setting may have, without what they are annotated with."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return kinds(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for each in get_args(annotation) for kind in kinds(each)]
    return [annotation]


def forms(name: str, annotation: Any) -> dict[str, Any]:
    """Returns how a setting may be written, with what is made of it."""
    (kind,) = {str(each): each for each in kinds(annotation) if each is not NoneType}.values()
    if name in OWN and not (name == "sharded" and kind is bool):
        return OWN[name]
    if kind is bool:
        return TRUTHS
    if get_origin(kind) is Literal:
        return {str(each): each for each in get_args(kind)}
    if get_origin(kind) is list:
        (item,) = kinds(get_args(kind)[0])
        return NUMBERS if item is int else ADAPTERS if item is AdapterSource else TEXTS
    return {float: {"0.5": 0.5}, int: {"1": 1}, str: {"a": "a", "1": "1"}, Path: {"/a": Path("/a")}, ByteSize: {}}[kind]


def cases() -> Iterator[Any]:
    for settings, flags in PROGRAMS.items():
        given = {flag.removeprefix("--").partition("=")[0].replace("-", "_") for flag in flags}
        for name, field in settings.model_fields.items():
            refused = any(isinstance(mark, RefusedSetting) and not mark.harmless for mark in field.metadata)
            positional = "CliPositionalArg" in str(field.metadata)
            if refused or positional or name in BESIDE_OTHERS | given or (settings, name) == (LauncherSettings, "env"):
                continue
            for text, value in forms(name, field.annotation).items():
                yield pytest.param(settings, name, text, value, id=f"{settings.__name__}-{name}-{text}")


@pytest.mark.parametrize(("settings", "name", "text", "value"), list(cases()))
def test_a_setting_is_taken_from_the_environment(
    settings: type[ServiceSettings], name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name.upper(), text)
    assert getattr(read_settings(settings, "program", PROGRAMS[settings]), name) == value
    flag = f"--{name.replace('_', '-')}"
    monkeypatch.delenv(name.upper())
    if value not in (True, False):
        read = read_settings(settings, "program", [*PROGRAMS[settings], f"{flag}={text}"])
        assert getattr(read, name) == value


@pytest.mark.parametrize("name", ["NGROK", "ROPE_SCALING", "ROPE_FACTOR", "WEIGHTS_CACHE_OVERRIDE"])
def test_what_is_refused_may_be_off_or_empty(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", *(["false", "0"] if name == "NGROK" else [])):
        monkeypatch.setenv(name, value)
        read_settings(LauncherSettings, "program", [])


@pytest.mark.parametrize(
    "value", ["loud", "info,", "router=", "=info", "info;debug", "info,router=loud", "a[b{c=d}]=info", ","]
)
@pytest.mark.parametrize("settings", [LauncherSettings, RouterSettings, Settings])
def test_severities_that_nobody_knows_are_refused(
    settings: type[ServiceSettings], value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOG_LEVEL", value)
    if value == "info,":  # as in other lists
        assert read_settings(settings, "program", PROGRAMS[settings]).model_dump()["log_level"] == "INFO"
        return
    with pytest.raises(SystemExit):
        read_settings(settings, "program", PROGRAMS[settings])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("program: --log-level (or LOG_LEVEL): ")
