"""The command lines of shards and router, read by the settings of shards and router."""

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
    "api_key",
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


def test_no_setting_is_ignored() -> None:
    passed_on = {*commands.ROUTER_FLAGS, *commands.SHARD_FLAGS}
    assert set(LauncherSettings.model_fields) - passed_on - OWN == set()


def test_every_flag_that_is_passed_on_is_known_to_the_program() -> None:
    assert set(commands.ROUTER_FLAGS) <= set(RouterSettings.model_fields)
    assert set(commands.SHARD_FLAGS) <= set(ShardSettings.model_fields)


def test_the_api_key_is_not_on_a_command_line(tmp_path: Path) -> None:
    router = commands.router(read("--api-key=secret"), tmp_path, [tmp_path / "shard-0"])
    assert router.environment == {"API_KEY": "secret"}
    assert "secret" not in " ".join(router.arguments)


def test_a_model_that_drafts_is_fetched_at_no_revision_of_the_large_one() -> None:
    settings = read("--model-id=a/large", "--revision=v2", "--speculative-model=a/small")
    assert "--revision=v2" in commands.download(settings, "a/large").arguments
    small = commands.download(settings, "a/small").arguments
    assert "a/small" in small
    assert "--revision=main" in small


def test_shards_know_their_place(tmp_path: Path) -> None:
    settings = read("--num-shard=2", "--master-port=5", "--dtype=bfloat16", "--cpu-memory=1GiB", "--trust-remote-code")
    sockets = [tmp_path / "shard-0", tmp_path / "shard-1"]
    first, second = commands.shards(settings, sockets)
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
    assert {"--sharded", f"--uds-path={tmp_path}/shard", "--dtype=bfloat16"} < set(second.arguments)
    there = read_settings(ShardSettings, "shard", first.arguments[first.arguments.index("serve") + 1 :])
    assert (there.cpu_memory, there.dtype, there.trust_remote_code) == (2**30, "bfloat16", True)


def test_shards_of_one_server_meet_at_a_free_port(tmp_path: Path) -> None:
    sockets = [tmp_path / "shard-0", tmp_path / "shard-1"]
    ports = {shard.environment["MASTER_PORT"] for shard in commands.shards(read("--num-shard=2"), sockets)}
    assert len(ports) == 1


def test_shards_of_another_machine_know_their_place(tmp_path: Path) -> None:
    flags = ("--num-nodes=3", "--node-rank=2", "--node-address=10.0.0.3", "--master-addr=10.0.0.1", "--num-shard=2")
    shards = commands.shards(read(*flags), [tmp_path / "shard-4", tmp_path / "shard-5"], store_port=7)
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
    (shard,) = commands.shards(read("--no-trust-remote-code"), [tmp_path / "shard-0"])
    there = read_settings(ShardSettings, "shard", shard.arguments[shard.arguments.index("serve") + 1 :])
    assert not there.trust_remote_code


def test_shards_beside_the_router_listen_on_no_port_whatever_variables_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISTEN_ADDRESS", "0.0.0.0")
    (shard,) = commands.shards(read(), [tmp_path / "shard-0"])
    for name, value in shard.environment.items():
        monkeypatch.setenv(name, value)
    there = read_settings(ShardSettings, "shard", shard.arguments[shard.arguments.index("serve") + 1 :])
    assert there.listen_address is None


def test_the_router_names_the_model_of_the_flag_not_that_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_ID", "of/the-image")
    command = commands.router(read("--model-id=of/the-flag"), tmp_path, [tmp_path / "shard-0"])
    assert read_settings(RouterSettings, "router", command.arguments[3:]).model_id == "of/the-flag"


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
    command = commands.router(
        read(f"--lora-adapters=chef={tmp_path}/a, {tmp_path}/b"), tmp_path, [tmp_path / "shard-0"]
    )
    there = read_settings(RouterSettings, "router", command.arguments[3:])
    assert [(each.id, each.folder) for each in there.lora_adapters] == [
        ("chef", tmp_path / "a"),
        (f"{tmp_path}/b", tmp_path / "b"),
    ]
