"""The command line: exit codes, one line for each mistake, and what goes where."""

import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from shared.stubs import generate_pb2 as pb
from tests.fakes.simulated_shard import SimulatedShard, running_shards
from tgi_server.benchmark import cli
from tgi_server.benchmark.settings import USUAL_SOCKET


def benchmark(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tgi_server.benchmark.cli", *flags],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "status", "complaint"),
    [
        pytest.param(
            ("--runs=0",), 2, "--runs (or RUNS): Input should be greater than 0, got '0'", marks=pytest.mark.slow
        ),
        (("--top-k=4294967296",), 2, "--top-k (or TOP_K): Input should be less than 2147483648, got '4294967296'"),
        pytest.param(
            ("--output=results.txt",),
            2,
            "--output (or OUTPUT): the name of the file must end with one of .json, .csv",
            marks=pytest.mark.slow,
        ),
        (("-m", "/absent/socket"), 1, "there is no socket /absent/socket; start `text-generation-launcher`"),
    ],
)
def test_a_mistake_gets_one_line(flags: tuple[str, ...], status: int, complaint: str) -> None:
    result = benchmark(*flags)
    assert result.returncode == status
    assert result.stderr.startswith(f"text-generation-benchmark: {complaint}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


async def test_a_table_goes_to_standard_output_and_progress_to_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "results.csv"
    async with running_shards(SimulatedShard(64, 4)) as running:
        monkeypatch.setenv("MASTER_SHARD_UDS_PATH", running.path)
        flags = ("--batch-size", "1", "-b", "2", "--runs", "1", "--plain", "-o", str(output))
        settings = cli.read_settings(cli.BenchmarkSettings, cli.PROGRAM, flags)
        results = await cli._measure(settings, cli._socket(settings.sockets()))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.partition(":")[0] for line in captured.err.splitlines()[1:]] == [
        "batch of 1, 10 + 8 tokens",
        "batch of 2, 10 + 8 tokens",
    ]
    assert len(results) == 2
    assert len(output.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("info", "answer", "told"),
    [
        (
            {"run_is_open": True, "running_sequences": 3},
            "",
            "3 requests are running on these shards and would fail; wait",
        ),
        (
            {"run_is_open": True},
            None,
            "a router is connected to these shards, and its requests will fail meanwhile; add",
        ),
        ({"run_is_open": True}, "n", "nothing was measured"),
        ({"run_is_open": True}, "", "nothing was measured"),
        ({"run_is_open": True}, "y", None),
        ({}, None, None),
    ],
)
def test_a_router_is_not_pushed_aside_without_a_word(
    info: dict[str, Any], answer: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return answer is not None

    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    monkeypatch.setattr("sys.stderr", Terminal())
    with pytest.raises(cli.StartupError, match=f"^{told}") if told else nullcontext():
        cli._check_nobody_is_disturbed(pb.InfoResponse(**info))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths have 107 bytes at most."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.skipif(USUAL_SOCKET.is_socket(), reason="a server of this machine listens at the usual place")
async def test_the_socket_of_the_one_server_that_runs_is_found(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    settings = cli.BenchmarkSettings()
    with pytest.raises(cli.StartupError, match="there is no socket"):
        cli._socket(settings.sockets())
    folders = [short_folder / f"text-generation-server-{name}" for name in ("a", "b", "killed")]
    async with running_shards(SimulatedShard(8, 4)) as running:
        for folder in folders:
            folder.mkdir()
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(folders[2] / "shard-0"))
        (folders[0] / "shard-0").hardlink_to(running.path)
        assert cli._socket(settings.sockets()) == str(folders[0] / "shard-0")
        (folders[1] / "shard-0").hardlink_to(running.path)
        with pytest.raises(cli.StartupError, match=r"several servers run here; choose one: -m .*a/shard-0 -m .*b/"):
            cli._socket(settings.sockets())
