"""The command lines of shards and router, and the file of settings, read by the settings of shards and router."""

from pathlib import Path

import pytest

from shared.settings import read_settings
from tgi_server.launcher import commands
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.settings import RouterSettings
from tgi_server.shard.settings import DownloadSettings, ShardSettings

# What the launcher handles itself; the rest goes to the shards or the router, or is refused.
OWN = {
    "model_id",
    "models",
    "models_memory",
    "huggingface_hub_cache",
    "num_shard",
    "sharded",
    "shard_uds_path",
    "master_addr",
    "master_port",
    "num_nodes",
    "node_rank",
    "node_address",
    "weights_cache_override",
    "enable_prefill_logprobs",
    "env",
    "ngrok",
    "ngrok_authtoken",
    "ngrok_edge",
}


def read(*flags: str) -> LauncherSettings:
    return read_settings(LauncherSettings, "launcher", flags)


def router(settings: LauncherSettings, folder: Path) -> RouterSettings:
    """Returns the settings that the router reads from its command line."""
    with commands.settings_file(settings) as file:
        command = commands.router(settings, file, folder, [folder / "shard-0"])
        return read_settings(RouterSettings, "router", command.arguments[3:])


def shard(settings: LauncherSettings, folder: Path) -> ShardSettings:
    """Returns the settings that the first shard reads from its command line, while its variables are set."""
    with commands.settings_file(settings) as file, pytest.MonkeyPatch.context() as patch:
        first, *_ = commands.shards(settings, file, [folder / "shard-0"])
        for name, value in first.environment.items():
            patch.setenv(name, value)
        return read_settings(ShardSettings, "shard", first.arguments[first.arguments.index("serve") + 1 :])


def test_no_setting_is_ignored() -> None:
    assert set(LauncherSettings.model_fields) - commands.SHARED - {"api_key"} - OWN == set()


def test_the_api_key_is_neither_on_a_command_line_nor_in_a_file(tmp_path: Path) -> None:
    settings = read("--api-key=secret")
    with commands.settings_file(settings) as file:
        command = commands.router(settings, file, tmp_path, [tmp_path / "shard-0"])
        assert "secret" not in file.read_text()
        assert file.stat().st_mode & 0o077 == 0
    assert not file.exists()
    assert command.environment == {"API_KEY": "secret"}
    assert "secret" not in " ".join(command.arguments)


def test_router_and_shard_have_the_settings_of_the_launcher(tmp_path: Path) -> None:
    flags = (
        "--max-input-tokens=5",
        "--max-total-tokens=9",
        "--cpu-memory=1GiB",
        "--cuda-graphs=1,2",
        "--dtype=float32",
    )
    settings = read(
        *flags, "--dtype=float32", "--trust-remote-code", "--served-model-name=a,b", "--log-level=warn,x=debug"
    )
    for there in router(settings, tmp_path), shard(settings, tmp_path):
        # The router's tokenizer_name is the model's folder, which has the tokenizer that was named.
        for name in commands.SHARED & type(there).model_fields.keys() - {"otlp_service_name", "tokenizer_name"}:
            assert getattr(there, name) == getattr(settings, name), name
    assert shard(read("--tokenizer-name=maker/other"), tmp_path).tokenizer_name == "maker/other"
    assert router(read("--tokenizer-name=maker/other"), tmp_path).tokenizer_name == tmp_path
    assert shard(settings, tmp_path).logger_level == settings.log_level


def test_a_model_that_drafts_is_fetched_at_no_revision_of_the_large_one() -> None:
    settings = read("--model-id=a/large", "--revision=v2", "--speculative-model=a/small")
    assert "--revision=v2" in commands.download(settings, "a/large").arguments
    small = commands.download(settings, "a/small").arguments
    assert "a/small" in small
    assert "--revision=main" in small


def test_shards_know_their_place(tmp_path: Path) -> None:
    settings = read("--num-shard=2", "--master-port=5")
    sockets = [tmp_path / "shard-0", tmp_path / "shard-1"]
    _, second = commands.shards(settings, tmp_path / "settings.json", sockets)
    assert second.name == "shard-1"
    assert second.environment == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "5",
        "LISTEN_ADDRESS": "",
    }
    assert {"--sharded", f"--uds-path={tmp_path}/shard"} < set(second.arguments)


def test_shards_of_one_server_meet_at_a_free_port(tmp_path: Path) -> None:
    sockets = [tmp_path / "shard-0", tmp_path / "shard-1"]
    started = commands.shards(read("--num-shard=2"), tmp_path / "settings.json", sockets)
    ports = {shard.environment["MASTER_PORT"] for shard in started}
    assert len(ports) == 1


def test_shards_of_another_machine_know_their_place(tmp_path: Path) -> None:
    flags = ("--num-nodes=3", "--node-rank=2", "--node-address=10.0.0.3", "--master-addr=10.0.0.1", "--num-shard=2")
    sockets = [tmp_path / "shard-4", tmp_path / "shard-5"]
    shards = commands.shards(read(*flags), tmp_path / "settings.json", sockets, store_port=7)
    assert [shard.name for shard in shards] == ["shard-4", "shard-5"]
    assert shards[1].environment == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "7",
        "LISTEN_ADDRESS": "",
    }
    assert {f"--uds-path={tmp_path}/shard", "--listen-address=10.0.0.3"} < set(shards[1].arguments)


def test_a_flag_that_is_off_wins_over_the_variable_that_children_inherit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUST_REMOTE_CODE", "true")
    assert not shard(read("--no-trust-remote-code"), tmp_path).trust_remote_code


def test_shards_beside_the_router_listen_on_no_port_whatever_variables_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISTEN_ADDRESS", "0.0.0.0")
    assert shard(read(), tmp_path).listen_address is None


def test_the_router_names_the_model_of_the_flag_not_that_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_ID", "of/the-image")
    assert router(read("--model-id=of/the-flag"), tmp_path).model_id == "of/the-flag"


def test_an_adapter_is_fetched_at_its_own_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVISION", "of-the-model")
    settings = read("--lora-adapters=chef=maker/chef@v2,diy=maker/diy", "--trust-remote-code")
    revisions = []
    for adapter in settings.lora_adapters:
        command = commands.download_adapter(settings, adapter)
        monkeypatch.setenv("REVISION", command.environment["REVISION"])
        there = read_settings(
            DownloadSettings, "download", command.arguments[command.arguments.index("download-weights") + 1 :]
        )
        assert (there.model_id, there.merge_lora, there.trust_remote_code) == (adapter.place, False, True)
        revisions.append(there.revision)
    assert revisions == ["v2", None]


def test_the_router_gets_the_folders_of_adapters(tmp_path: Path) -> None:
    there = router(read(f"--lora-adapters=chef={tmp_path}/a, {tmp_path}/b"), tmp_path)
    assert [(each.id, each.path) for each in there.lora_adapters] == [
        ("chef", tmp_path / "a"),
        (f"{tmp_path}/b", tmp_path / "b"),
    ]
