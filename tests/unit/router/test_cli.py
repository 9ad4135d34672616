"""`text-generation-router`: whatever keeps it from starting is told in one line, with the exit code of its kind."""

import socket
from pathlib import Path

import pytest

from tgi_server import demo_model
from tgi_server.router import cli

USAGE, FAILED = 2, 1


def complaint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str, model: Path = demo_model.PATH
) -> tuple[int, str]:
    """Returns the exit code, and the one line on standard error."""
    monkeypatch.setattr(cli, "configure_logging", lambda *arguments, **keywords: None)
    usual = (f"--tokenizer-name={model}", "--hostname=127.0.0.1", "--port=0", "--prometheus-port=0")
    monkeypatch.setattr("sys.argv", ["text-generation-router", *usual, *flags])
    with pytest.raises(SystemExit) as end:
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert isinstance(end.value.code, int)
    return end.value.code, line.removeprefix("text-generation-router: ")


def test_an_unknown_flag_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    code, line = complaint(monkeypatch, capsys, "--nonsense=3")
    assert code == USAGE
    assert "--nonsense=3" in line


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--usage-stats=some", "--usage-stats (or USAGE_STATS): Input should be 'on', 'off' or 'no-stack'"),
        ("--max-input-tokens=9 --max-total-tokens=9", "--max-input-tokens (9) must be less than"),
        (
            "--log-level=loud",
            "--log-level (or LOG_LEVEL): 'loud' is not a log level; use DEBUG, INFO, WARNING or ERROR",
        ),
        ("--api-key=", "--api-key (or API_KEY) is set, but empty"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, told: str
):
    code, line = complaint(monkeypatch, capsys, *flag.split())
    assert code == USAGE
    assert told in line


def test_a_model_folder_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    code, line = complaint(monkeypatch, capsys, model=tmp_path / "absent")
    assert code == FAILED
    assert line.startswith(f"{tmp_path}/absent is not a folder; --tokenizer-name needs the folder")


def test_a_port_in_use_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = complaint(monkeypatch, capsys, f"--port={port}", model=tmp_path / "absent")
    assert code == FAILED
    assert line.startswith(f"cannot listen on 127.0.0.1:{port} (--port): ")


def test_usage_statistics_that_are_asked_for_are_not_sent_which_one_line_says(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
):
    caplog.set_level("INFO")
    for value in ("on", "no-stack", "off"):
        complaint(monkeypatch, capsys, f"--usage-stats={value}", model=tmp_path / "absent")
    assert caplog.messages.count("--usage-stats has no effect: no statistics are ever sent") == 2
