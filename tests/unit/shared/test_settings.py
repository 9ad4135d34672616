"""Settings that every process reads in the same way."""

from pathlib import Path

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


def test_flags_outweigh_a_file_and_that_outweighs_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"port": 5, "max_best_of": 7, "of_another_program": 1}')
    monkeypatch.setenv("PORT", "3")
    monkeypatch.setenv("MAX_BEST_OF", "3")
    monkeypatch.setenv("MAX_STOP_SEQUENCES", "3")
    settings = read_settings(LauncherSettings, "program", [f"--settings-file={file}", "--max-best-of=9"])
    assert (settings.port, settings.max_best_of, settings.max_stop_sequences) == (5, 9, 3)


@pytest.mark.parametrize("content", [None, "", "[1]", "{"])
def test_a_file_without_settings_is_refused(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit):
        read_settings(LauncherSettings, "program", [f"--settings-file={file}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"program: --settings-file: {file} is not a file with a JSON object: ")


def test_a_wrong_value_of_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.json").write_text('{"port": -5}')
    with pytest.raises(SystemExit):
        read_settings(LauncherSettings, "program", [f"--settings-file={tmp_path}/settings.json"])
    assert "--port (or PORT): " in capsys.readouterr().err
