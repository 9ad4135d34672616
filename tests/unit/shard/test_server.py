"""A shard's process makes its engine from its settings, and says in one line why it cannot."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared import gpus
from shared.settings import read_settings
from tgi_server.engine.errors import PeerLost
from tgi_server.shard import server
from tgi_server.shard.server import FATAL_STATUS, Loaded, engine_config, load
from tgi_server.shard.settings import ShardSettings


def settings(*flags: str) -> ShardSettings:
    return read_settings(ShardSettings, "text-generation-server serve", flags)


def test_flags_become_the_engines_settings(tmp_path: Path):
    flags = ["--dtype=bfloat16", "--cpu-memory=1GiB", "--disable-custom-kernels", "--watermark-delta=3"]
    config = engine_config(settings(*flags), tmp_path)
    assert (config.model_path, config.dtype, config.cpu_memory) == (tmp_path, torch.bfloat16, 2**30)
    assert (config.custom_kernels, config.watermark_delta, config.group) == (False, 3.0, None)


@pytest.mark.parametrize(("flags", "sizes"), [([], None), (["--cuda-graphs=0"], ()), (["--cuda-graphs=1,8"], (1, 8))])
def test_no_sizes_of_cuda_graphs_are_told_apart_from_the_usual_ones(
    tmp_path: Path, flags: list[str], sizes: tuple[int, ...] | None
):
    assert engine_config(settings(*flags), tmp_path).cuda_graphs == sizes


def test_a_model_that_cannot_be_loaded_ends_the_process_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        load(settings(), tmp_path)
    assert end.value.code == 1
    assert capsys.readouterr().err == (
        f"shard-0: {tmp_path} has no config.json; is it a model folder in transformers format?\n"
    )


def test_a_shard_that_loses_another_while_loading_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def lose(_: ShardSettings) -> None:
        raise PeerLost("shard 0 has ended")

    monkeypatch.setattr(server, "_connect", lose)
    with pytest.raises(SystemExit) as end:
        load(settings("--sharded", "--world-size=2", "--rank=1"), tmp_path)
    assert end.value.code == FATAL_STATUS
    assert capsys.readouterr().err == "shard-1: another shard was lost while loading: shard 0 has ended\n"


@pytest.fixture
def unusable_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver knows a GPU, but is too old for this torch, which is built with CUDA."""

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040)")

    (tmp_path / "gpus" / "0000:00:00.0").mkdir(parents=True)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "gpus")
    monkeypatch.setattr(gpus, "DEVICES", (f"{tmp_path}/nvidia[0-9]",))
    for name in (*gpus.VARIABLES, gpus.COUNT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse)


def error_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        load(settings(), tmp_path / "absent")
    assert end.value.code == 1
    return capsys.readouterr().err


TOO_OLD = "torch cannot use it: The NVIDIA driver on your system is too old"


@pytest.mark.usefixtures("unusable_gpu")
@pytest.mark.parametrize(("variable", "remedy"), [("CUDA_VISIBLE_DEVICES", "set"), ("GPU_COUNT", "unset")])
def test_gpus_that_are_requested_and_cannot_be_used_end_the_process(
    variable: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(variable, "1")
    line = error_of(tmp_path, capsys)
    assert line.startswith(f"shard-0: {variable} is 1, but {TOO_OLD}; to run on the CPU, {remedy} {variable}")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert f"{variable} is 1, but this torch is built without CUDA; " in error_of(tmp_path, capsys)


@pytest.mark.usefixtures("unusable_gpu")
def test_a_gpu_that_is_given_and_cannot_be_used_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "nvidia0").touch()
    assert error_of(tmp_path, capsys) == (
        f"shard-0: this machine has a GPU, but {TOO_OLD}; to run on the CPU, set CUDA_VISIBLE_DEVICES to an empty "
        "value\n"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "no model folder at" in error_of(tmp_path, capsys)


@pytest.mark.usefixtures("unusable_gpu")
def test_a_gpu_that_computes_nothing_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As one that is older than any that torch was compiled for."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nSearch for")

    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "ones", refuse)
    assert "torch cannot use it: CUDA error: no kernel image is available for execution on the device; to run" in (
        error_of(tmp_path, capsys)
    )


@pytest.mark.usefixtures("unusable_gpu")
def test_the_gpu_of_a_containers_host_is_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    assert "no model folder at" in error_of(tmp_path, capsys)
    assert caplog.messages == [f"running on the CPU although this machine has a GPU: {TOO_OLD}"]


@pytest.mark.parametrize(
    ("device", "group", "status"), [("cuda", object(), 0), ("cuda", None, None), ("cpu", object(), None)]
)
def test_shards_on_gpus_end_without_waiting_for_each_other(
    device: str, group: Any, status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ended: list[int | None] = []

    async def stopped(*_: object) -> None:
        pass

    monkeypatch.setattr(server, "_serve", stopped)
    monkeypatch.setattr(server.os, "_exit", ended.append)
    engine: Any = SimpleNamespace(info=SimpleNamespace(device_type=device))
    server.serve(settings(), tmp_path, {}, Loaded(engine, group, {}))
    assert ended == ([] if status is None else [status])


def test_more_shards_than_gpus_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as end:
        load(settings("--sharded", "--world-size=2", "--rank=1"), tmp_path)
    assert end.value.code == 1
    assert "shard 1 is to run on GPU 1, but this machine has 1; lower --num-shard" in capsys.readouterr().err
