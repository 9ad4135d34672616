"""Settings that every process reads in the same way."""

import pytest

from shared.settings import ServiceSettings, read_settings
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.settings import RouterSettings

PROGRAMS = [(LauncherSettings, []), (RouterSettings, ["--tokenizer-name=/model"])]


@pytest.mark.parametrize(("settings", "flags"), PROGRAMS)
@pytest.mark.parametrize("value", ["", "  "])
def test_a_key_that_is_set_but_empty_is_refused(
    settings: type[ServiceSettings],
    flags: list[str],
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read_settings(settings, "program", [*flags, f"--api-key={value}"])
    monkeypatch.setenv("API_KEY", value)
    with pytest.raises(SystemExit):
        read_settings(settings, "program", flags)
    by_flag, by_variable = capsys.readouterr().err.splitlines()
    assert by_flag == by_variable
    assert by_flag.startswith("program: --api-key (or API_KEY) is set, but empty; give it a value, or leave it out")


def test_a_flag_outweighs_an_empty_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "")
    assert read_settings(LauncherSettings, "program", ["--api-key=secret"]).api_key == "secret"


def test_other_variables_may_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTLP_ENDPOINT", "")
    monkeypatch.delenv("API_KEY", raising=False)
    settings = read_settings(LauncherSettings, "program", [])
    assert (settings.api_key, settings.otlp_endpoint) == (None, None)
