"""`text-generation-server`: a mistake gets one clear line and exit code 2, a model that is not there exit code 1."""

import os
import re
from pathlib import Path

import pytest

from tgi_server.model_files import download
from tgi_server.model_files.errors import ModelUnavailable
from tgi_server.shard import cli

USAGE, FAILED = 2, 1
COMMANDS = ("serve", "download-weights", "quantize")
BINDINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves this process's log and environment as they are."""
    monkeypatch.setattr(cli, "configure_logging", lambda *arguments, **keywords: None)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", *BINDINGS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Returns the exit code."""
    monkeypatch.setattr("sys.argv", ["text-generation-server", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "usage: text-generation-server {serve,download-weights,quantize} MODEL_ID"),
        (("sing",), "there is no command 'sing'"),
        (("serve", "--no-such-flag"), "unrecognized arguments: --no-such-flag"),
        (("serve", "--rank=2"), "RANK is 2, so WORLD_SIZE must be more than 1"),
        (("serve", "--cpu-memory=lots"), "--cpu-memory (or CPU_MEMORY):"),
        (("serve", "--world-size=2"), "WORLD_SIZE is 2, which takes --sharded"),
        (("serve", "--sharded", "--world-size=2", "--local-world-size=3"), "LOCAL_WORLD_SIZE is 3, more than"),
        (("download-weights", "--extension=.pt"), "--extension (or EXTENSION):"),
        (("quantize", "model", "folder", "--groupsize=0"), "--groupsize (or GROUPSIZE): it must be at least 1"),
        (("quantize", "model"), "the following arguments are required: OUTPUT-DIR"),
        (("quantize", "model", "folder", "--upload-to-model-id=me/it"), "not supported; upload the folder with"),
    ],
)
def test_a_mistake_gets_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
):
    assert run(monkeypatch, *arguments) == USAGE
    assert expected in capsys.readouterr().err.splitlines()[0]


def test_help_lists_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    assert re.findall(r"(?m)^  ([a-z-]+)  +[A-Z]", capsys.readouterr().out) == list(COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], *([name, "--help"] for name in COMMANDS)])
def test_every_command_has_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    assert run(monkeypatch, *arguments) == 0
    assert "usage: text-generation-server" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_told_with_the_shards_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = ("serve", "/absent/model", "--sharded", "--world-size=2", "--rank=1")
    assert run(monkeypatch, *arguments) == FAILED
    assert capsys.readouterr().err == "shard-1: there is no model folder /absent/model\n"


def test_idle_threads_sleep_soon_unless_the_user_wants_something_else(monkeypatch: pytest.MonkeyPatch):
    run(monkeypatch, "serve", "/absent/model")
    assert os.environ["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    run(monkeypatch, "serve", "/absent/model")
    assert os.environ["GOMP_SPINCOUNT"] == "5"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    run(monkeypatch, "serve", "/absent/model")
    assert "GOMP_SPINCOUNT" not in os.environ


def test_openmp_binds_no_thread_to_a_core(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    for name, value in zip(BINDINGS, ("close", "cores", "0-1"), strict=True):
        monkeypatch.setenv(name, value)
    run(monkeypatch, "serve", "/absent/model")
    assert not set(BINDINGS) & set(os.environ)
    assert [record.getMessage().split()[0] for record in caplog.records] == list(BINDINGS)
    caplog.clear()
    monkeypatch.setenv("OMP_PROC_BIND", "FALSE")
    run(monkeypatch, "serve", "/absent/model")
    assert not caplog.records


def test_a_download_prints_nothing_but_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setattr(download, "download_model", lambda model_id, revision, **_: tmp_path / model_id)
    assert run(monkeypatch, "download-weights", "tiny") == 0
    assert capsys.readouterr().out == f"{tmp_path}/tiny\n"


@pytest.mark.parametrize(
    ("error", "code"), [(ModelUnavailable("the hub has no model tiny"), FAILED), (KeyboardInterrupt(), 130)]
)
def test_a_download_that_fails_or_is_interrupted_prints_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
):
    def fail(*arguments: object, **keywords: object) -> None:
        raise error

    monkeypatch.setattr(download, "download_model", fail)
    assert run(monkeypatch, "download-weights", "tiny") == code
    output = capsys.readouterr()
    assert output.out == ""
    assert str(error) in output.err
