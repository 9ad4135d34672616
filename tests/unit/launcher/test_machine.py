"""GPUs, addresses and ports of this machine."""

import socket
from pathlib import Path

import pytest

from shared.settings import read_settings
from tgi_server.launcher import machine
from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.machine import check_address, check_port, free_port, shard_count
from tgi_server.launcher.settings import LauncherSettings


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in machine.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "gpus")


def gpus(count: int) -> None:
    """Makes the driver list so many GPUs."""
    for each in range(count):
        (machine.DRIVER / f"0000:0{each}:00.0").mkdir(parents=True)


def count(*flags: str) -> int:
    return shard_count(read_settings(LauncherSettings, "launcher", flags))


def test_one_unless_told() -> None:
    gpus(4)
    assert count() == 1
    assert count("--sharded=false") == 1
    assert count("--num-shard=3") == 3


@pytest.mark.parametrize("variable", machine.VARIABLES)
@pytest.mark.parametrize(("value", "expected"), [("0,2,3", 3), ("GPU-1a,GPU-2b", 2), ("5", 1), ("", 1), ("-1", 1)])
def test_gpus_that_are_listed_are_used(
    variable: str, value: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert count() == expected
    assert count("--num-shard=7") == 7


def test_sharded_takes_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(4)
    assert count("--sharded=true") == 4
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    assert count("--sharded=true") == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert count("--sharded=true") == 2


def test_sharded_without_gpus_says_what_to_do() -> None:
    with pytest.raises(CannotStartError, match=r"^--sharded: no GPU is visible; give --num-shard the number"):
        count("--sharded=true")
    gpus(1)
    with pytest.raises(CannotStartError, match=r"^--sharded: only one GPU is visible; leave --sharded out"):
        count("--sharded=true")
    with pytest.raises(CannotStartError, match=r"^--sharded needs several shards; give --num-shard more than 1"):
        count("--sharded=true", "--num-shard=1")


def test_a_port_in_use_is_told_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CannotStartError, match=rf"^port {port} is in use; choose another with --port$"):
            check_port("127.0.0.1", port, "--port")
    check_port("127.0.0.1", port, "--port")
    check_port("127.0.0.1", free_port(), "--port")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("192.0.2.1", "--node-address: 192.0.2.1 is not an address of this machine"),
        ("no such name", "--node-address: the host name no such name is not known"),
    ],
)
def test_an_address_of_another_machine_is_refused(address: str, reason: str) -> None:
    with pytest.raises(CannotStartError, match=reason):
        check_address(address, "--node-address")
    check_address("127.0.0.1", "--node-address")
