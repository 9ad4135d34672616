"""A shard's settings come from flags and from the variables that launchers of several processes set."""

import pytest

from shared.settings import read_settings
from tgi_server import demo_model
from tgi_server.shard.settings import DownloadSettings, QuantizeSettings, ShardSettings


def read(*flags: str) -> ShardSettings:
    return read_settings(ShardSettings, "text-generation-server serve", flags)


def test_without_flags_a_shard_serves_the_demo_model_alone():
    settings = read()
    assert settings.model_id == str(demo_model.PATH)
    assert (settings.rank, settings.world_size, settings.sharded) == (0, 1, False)
    assert (settings.dtype, settings.cpu_memory, settings.cuda_graphs) == (None, None, None)


def test_a_launcher_tells_each_process_its_place_by_variables(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1234")
    settings = read("--sharded")
    assert (settings.rank, settings.world_size, settings.local_rank, settings.local_world_size) == (3, 4, 1, 2)
    assert settings.master_port == 1234


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 * 2**30), ("4GB", 4 * 10**9), ("500MiB", 500 * 2**20), ("1024", 1024)]
)
def test_the_memory_of_the_cache_is_read_with_its_unit(text: str, size: int):
    assert read(f"--cpu-memory={text}").cpu_memory == size


def test_sizes_of_cuda_graphs_are_a_list():
    assert read("--cuda-graphs=1,2,32").cuda_graphs == [1, 2, 32]
    assert read("--cuda-graphs=0").cuda_graphs == [0]


@pytest.mark.parametrize(
    "flag",
    [
        *("--cpu-memory=0", "--cuda-memory-fraction=1.5", "--watermark-gamma=1", "--watermark-delta=inf"),
        *("--dtype=int4", "--speculate=33"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_the_flags_name(flag: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        read(flag)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"text-generation-server serve: {flag.partition('=')[0]} (or ")


def test_the_help_of_quantize_tells_of_both_sizes_of_weights(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        read_settings(QuantizeSettings, "quantize", ["--help"])
    assert "to 4 or 8 bits" in " ".join(capsys.readouterr().out.split())


def test_a_download_takes_safetensors_and_converts_what_has_none():
    settings = read_settings(DownloadSettings, "download", ["maker/tiny", "--revision=v2"])
    assert (settings.model_id, settings.revision) == ("maker/tiny", "v2")
    assert (settings.extension, settings.auto_convert, settings.trust_remote_code) == (".safetensors", True, False)
