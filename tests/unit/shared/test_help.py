"""`--help` lists the settings in groups; `--version` and near misses are the same for every program."""

import re

import pytest

from llm_functionalities.settings import Settings as FrontSettings
from shared.settings import ServiceSettings, read_settings
from tgi_server.benchmark.settings import BenchmarkSettings
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.settings import RouterSettings
from tgi_server.shard.settings import DownloadSettings, QuantizeSettings, ShardSettings

PROGRAMS = (
    *(LauncherSettings, RouterSettings, ShardSettings, DownloadSettings, QuantizeSettings),
    *(FrontSettings, BenchmarkSettings),
)


def output(settings: type[ServiceSettings], capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as end:
        read_settings(settings, "program", flags)
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("settings", PROGRAMS, ids=lambda settings: settings.__name__)
def test_help_describes_every_setting_with_its_variable(
    settings: type[ServiceSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(settings, capsys, "--help")
    for name in settings.model_fields:
        assert re.search(rf"\[{name.upper()}\]\n      \w", text), name
    assert "None" not in text
    assert "==" not in text
    assert max(map(len, text.splitlines())) <= 160


def test_help_has_groups_values_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(LauncherSettings, capsys, "-h")
    groups = re.findall(r"(?m)^(\S.*):$", text)
    assert groups[0] == "Model"
    assert groups[-1] == "Not supported, unlike in TGI"
    assert len(groups) == len(set(groups))
    assert "  --dtype float32|float16|bfloat16  [DTYPE]\n" in text
    assert (
        "  -p, --port NUMBER  [PORT]\n      Port of the HTTP API; with `oatmill serve` 8080. Default: 3000.\n" in text
    )
    assert "\n      auto: OpenAI's routes" in text
    assert "--no-prefix-caching turns it off" in " ".join(text.split())
    assert "default: the bundled demo model" in text
    refused = text.partition("Not supported, unlike in TGI:")[2]
    for flag in ("--rope-scaling", "--weights-cache-override", "--ngrok"):
        assert flag in refused


@pytest.mark.parametrize(
    ("settings", "entry", "group"),
    [
        (LauncherSettings, "--served-model-name", "Model"),
        (LauncherSettings, "--log-level", "Logs and traces"),
        (LauncherSettings, "--max-best-of", "Limits of requests"),
        (RouterSettings, "--log-level", "Logs and traces"),
        (ShardSettings, "MODEL_ID", "Model"),
        (ShardSettings, "--logger-level", "Logs and traces"),
        (QuantizeSettings, "OUTPUT_DIR", "Settings"),
        (FrontSettings, "--tls-cert", "TLS"),
        (FrontSettings, "--log-level", "Logs and traces"),
    ],
)
def test_help_lists_a_setting_in_its_group(
    settings: type[ServiceSettings], entry: str, group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = re.split(rf"(?m)^  {entry}\b", output(settings, capsys, "--help"))[0]
    assert re.findall(r"(?m)^(\S.*):$", before)[-1] == group


@pytest.mark.parametrize("settings", PROGRAMS, ids=lambda settings: settings.__name__)
@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(settings: type[ServiceSettings], capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert re.fullmatch(r"program \d+\.\d+\.\d+\n", output(settings, capsys, flag))


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--modl-id=x", "did you mean --model-id?"),
        ("--no-such-thing-at-all", "see program --help"),
        ("--mod=x", "see program --help"),
    ],
)
def test_a_near_miss_is_suggested(capsys: pytest.CaptureFixture[str], flag: str, hint: str) -> None:
    with pytest.raises(SystemExit):
        read_settings(LauncherSettings, "program", [flag])
    assert capsys.readouterr().err == f"program: unrecognized arguments: {flag}; {hint}\n"


@pytest.mark.parametrize("flags", ["--ngrok", "--ngrok-authtoken=x", "--ngrok-edge=x"])
def test_a_tunnel_is_refused_by_name(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    with pytest.raises(SystemExit):
        read_settings(LauncherSettings, "program", [flags])
    assert "not supported; run ngrok beside the server" in capsys.readouterr().err


def test_only_settings_that_differ_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACKED_WEIGHTS_CACHE")  # which tests have
    assert read_settings(LauncherSettings, "program", []).describe() == "all have their defaults"
    settings = read_settings(LauncherSettings, "program", ["--port=81", "--api-key=secret"])
    assert settings.describe() == "port=81 api_key=***"
