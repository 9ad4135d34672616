"""`text-generation-launcher`: a mistake gets one clear line, and an exit code that tells what kind of mistake it is."""

import signal
import socket
import sys
from collections.abc import Iterator

import pytest

from tgi_server.launcher import cli

USAGE, FAILED = 2, 1


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves this process's log and signal handlers as they are."""
    monkeypatch.setattr(cli, "configure_logging", lambda *arguments, **keywords: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def complaint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """Returns the exit code, and the one line on standard error without the program's name."""
    usual = ("--hostname=127.0.0.1", "--prometheus-port=0")
    monkeypatch.setattr("sys.argv", ["text-generation-launcher", *usual, *flags])
    with pytest.raises(SystemExit) as end:
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert isinstance(end.value.code, int)
    return end.value.code, line.removeprefix("text-generation-launcher: ")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--num-shard=0", "--num-shard (or NUM_SHARD): Input should be greater than 0, got '0'"),
        ("--port=99999", "--port (or PORT): Input should be less than or equal to 65535, got '99999'"),
        ("--dtype=int4", "--dtype (or DTYPE): Input should be 'float32', 'float16' or 'bfloat16', got 'int4'"),
        (
            "--max-input-tokens=9 --max-total-tokens=9",
            "--max-input-tokens (9) must be less than --max-total-tokens (9)",
        ),
    ],
)
def test_a_value_that_cannot_be_is_told_with_its_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, told: str
):
    code, line = complaint(monkeypatch, capsys, *flags.split())
    assert code == USAGE
    assert line.startswith(told)


def test_a_variable_that_cannot_be_is_told_with_its_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MAX_BEST_OF", "none")
    code, line = complaint(monkeypatch, capsys)
    assert code == USAGE
    assert line.startswith("--max-best-of (or MAX_BEST_OF): Input should be a valid integer")


def test_a_port_in_use_is_told_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = complaint(monkeypatch, capsys, f"--port={port}")
    assert told == (FAILED, f"port {port} is in use; choose another with --port")


@pytest.mark.parametrize("name", ["no-such-host.invalid", "pod_with_underscores"])
def test_a_host_name_of_the_environment_that_is_not_known_means_all_addresses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], name: str
):
    monkeypatch.setenv("HOSTNAME", name)
    with socket.create_server(("0.0.0.0", 0)) as taken:  # which ends the launcher after the address has been taken
        port = taken.getsockname()[1]
        monkeypatch.setattr("sys.argv", ["text-generation-launcher", "--prometheus-port=0", f"--port={port}"])
        with pytest.raises(SystemExit):
            cli.main()
    assert f"port {port} is in use" in capsys.readouterr().err
    assert f"HOSTNAME is {name!r}, which is not an address of this machine; listening on all" in caplog.text


def test_a_host_name_of_the_command_line_that_is_not_known_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HOSTNAME", "no-such-host.invalid")
    told = complaint(monkeypatch, capsys, "--hostname=no-such-host.invalid")
    reason = "the host name no-such-host.invalid is not known; give an address of this machine"
    assert told == (FAILED, f"--hostname: {reason}")


def test_shards_for_all_gpus_need_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, line = complaint(monkeypatch, capsys, "--sharded=true")
    assert code == FAILED
    assert line == "--sharded: no GPU is visible; give --num-shard the number of processes that share the CPUs"


@pytest.mark.parametrize("flags", ["--hostname=192.0.2.1", "--num-nodes=2 --node-address=192.0.2.1"])
def test_an_address_of_another_machine_is_told_with_its_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str
):
    flag = flags.split()[-1].partition("=")[0]
    told = complaint(monkeypatch, capsys, *flags.split())
    assert told == (FAILED, f"{flag}: 192.0.2.1 is not an address of this machine")


def test_a_model_server_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("torch", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, None)
    told = complaint(monkeypatch, capsys)
    assert told == (
        FAILED,
        "the model server lacks torch, uvicorn; run pip install --find-links dist 'oatmill[server]'",
    )


def test_help_lists_the_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.argv", ["text-generation-launcher", "--help"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    assert "--max-total-tokens" in capsys.readouterr().out
