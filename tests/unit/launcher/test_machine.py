"""GPUs, addresses and ports of this machine."""

import socket
from pathlib import Path

import pytest

from shared import gpus
from shared.addresses import free_port
from shared.settings import read_settings
from tgi_server.launcher import machine
from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.machine import check_address, check_gpus, check_port, check_shards, shard_count
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.api.server import reserve


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*gpus.VARIABLES, gpus.COUNT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "gpus")
    monkeypatch.setattr(gpus, "DEVICES", ())


def add_gpus(count: int) -> None:
    """Makes the driver list so many GPUs."""
    for each in range(count):
        (gpus.DRIVER / f"0000:0{each}:00.0").mkdir(parents=True)


def count(*flags: str) -> int:
    return shard_count(read_settings(LauncherSettings, "launcher", flags))


def test_one_unless_told() -> None:
    add_gpus(4)
    assert count() == 1
    assert count("--sharded=false") == 1
    assert count("--num-shard=3") == 3


@pytest.mark.parametrize("variable", gpus.VARIABLES)
@pytest.mark.parametrize(("value", "expected"), [("0,2,3", 3), ("GPU-1a,GPU-2b", 2), ("5", 1), ("", 1), ("-1", 1)])
def test_gpus_that_are_listed_are_used(
    variable: str, value: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert count() == expected
    assert count("--num-shard=7") == 7


def test_sharded_takes_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpus(4)
    assert count("--sharded=true") == 4
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    assert count("--sharded=true") == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert count("--sharded=true") == 2


@pytest.mark.parametrize("variable", gpus.VARIABLES)
def test_gpus_that_are_listed_and_not_there_end_the_start(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "0,1")
    with pytest.raises(CannotStartError) as error:
        check_gpus()
    assert str(error.value) == (
        f"{variable} is 0,1, but this machine has no GPU; to run on the CPU, set {variable} to an empty value"
    )
    for nobody in ("", "all", "void"):
        monkeypatch.setenv(variable, nobody)
        check_gpus()
    monkeypatch.setenv(variable, "0,1")
    add_gpus(2)
    check_gpus()


def test_gpus_that_are_requested_by_number_and_not_there_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_COUNT", "2")
    with pytest.raises(
        CannotStartError, match=r"^GPU_COUNT is 2, but this machine has no GPU; to run on the CPU, unset "
    ):
        check_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_gpus()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "void")  # the container toolkit sets it beside GPUs, too
    with pytest.raises(CannotStartError):
        check_gpus()
    for none in ("", "0"):
        monkeypatch.setenv("GPU_COUNT", none)
        check_gpus()


def test_shards_need_a_core_each_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    check_shards(2)
    with pytest.raises(CannotStartError, match=r"^99 shards would share 2 cores, .*; lower --num-shard to 2$"):
        check_shards(99)
    add_gpus(4)
    check_shards(4)


def test_sharded_without_gpus_says_what_to_do() -> None:
    with pytest.raises(CannotStartError, match=r"^--sharded: no GPU is visible; give --num-shard the number"):
        count("--sharded=true")
    add_gpus(1)
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


def test_a_port_of_a_server_that_loads_is_in_use() -> None:
    port = free_port()
    with (
        reserve("127.0.0.1", port, "--port"),
        pytest.raises(CannotStartError, match=rf"^port {port} is in use; choose another with --port$"),
    ):
        check_port("127.0.0.1", port, "--port")
    check_port("127.0.0.1", port, "--port")
