import socket
from pathlib import Path

import pytest

from shared.settings import read_settings
from tgi_server import demo_model
from tgi_server.launcher import commands
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.settings import RouterSettings
from tgi_server.shard.settings import ShardSettings

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
}
"""What the launcher handles itself; the rest goes to the shards or the router, or is refused."""

REFERENCE = """
model-id revision validation-workers sharded num-shard quantize speculate dtype kv-cache-dtype trust-remote-code
max-concurrent-requests max-best-of max-stop-sequences max-top-n-tokens max-input-tokens max-input-length
max-total-tokens waiting-served-ratio max-batch-prefill-tokens max-batch-total-tokens max-waiting-tokens
max-batch-size cuda-graphs hostname port prometheus-port shard-uds-path master-addr master-port
huggingface-hub-cache weights-cache-override disable-custom-kernels cuda-memory-fraction rope-scaling rope-factor
json-output otlp-endpoint otlp-service-name cors-allow-origin api-key watermark-gamma watermark-delta
tokenizer-config-path disable-grammar-support env max-client-batch-size lora-adapters payload-limit
enable-prefill-logprobs graceful-termination-timeout usage-stats
"""
"""TGI's launcher flags."""


def read(*flags: str) -> LauncherSettings:
    return read_settings(LauncherSettings, "launcher", flags)


def test_every_flag_of_tgi_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    listed = capsys.readouterr().out
    assert [flag for flag in REFERENCE.split() if f"--{flag}" not in listed] == []


def test_no_setting_is_ignored() -> None:
    passed_on = {*commands.ROUTER_FLAGS, *commands.SHARD_FLAGS}
    assert set(LauncherSettings.model_fields) - passed_on - OWN == set()


def test_what_is_passed_on_is_known_there() -> None:
    assert set(commands.ROUTER_FLAGS) <= set(RouterSettings.model_fields)
    assert set(commands.SHARD_FLAGS) <= set(ShardSettings.model_fields)


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("quantize", "gptq", "of the ways to quantise, int8 is supported, on CPUs"),
        ("speculate", "3", "speculative decoding is not supported yet"),
        ("kv-cache-dtype", "fp8_e4m3fn", "the KV cache has the dtype of the model; 8-bit caches are not supported yet"),
        ("lora-adapters", "a", "adapters are not supported yet; merge the adapter into the model and serve that"),
        ("rope-scaling", "linear", "not supported yet; set rope_parameters in the model's config.json"),
        ("rope-factor", "2", "not supported yet; set rope_parameters in the model's config.json"),
        ("weights-cache-override", "/a", "not supported; give the folder that has the weights as the model id"),
        ("usage-stats", "on", "this server sends no usage statistics to anyone"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    flag: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        read(f"--{flag}={value}")
    assert end.value.code == 2
    assert capsys.readouterr().err == f"launcher: --{flag} (or {flag.replace('-', '_').upper()}): {reason}\n"


def test_what_asks_for_nothing_is_let_through() -> None:
    assert read("--speculate=0", "--usage-stats=off", "--quantize=int8").quantize == "int8"


def test_limits_that_do_not_fit_together_are_found_before_anything_is_fetched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read("--max-input-tokens=8", "--max-total-tokens=8")
    assert "--max-input-tokens (8) must be less than --max-total-tokens (8)" in capsys.readouterr().err


def test_a_port_that_nobody_would_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--port=0")
    assert "--port (or PORT): the launcher needs a port that it knows" in capsys.readouterr().err


def test_the_demo_model_is_the_default() -> None:
    assert read().model_id == str(demo_model.PATH)


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_INPUT_LENGTH", "7")
    monkeypatch.setenv("PORT", "80")
    monkeypatch.setenv("CORS_ALLOW_ORIGIN", "https://a,https://b")
    monkeypatch.setenv("LOG_LEVEL", "warn")
    settings = read("--port=81")
    assert (settings.max_input_tokens, settings.port) == (7, 81)
    assert settings.cors_allow_origin == ["https://a", "https://b"]
    assert settings.log_level == "WARNING"


def test_a_containers_own_name_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTNAME", socket.gethostname())
    assert read().hostname == "0.0.0.0"


def test_the_api_key_is_not_on_a_command_line(tmp_path: Path) -> None:
    router = commands.router(read("--api-key=secret"), tmp_path, [tmp_path / "shard-0"])
    assert router.environment == {"API_KEY": "secret"}
    assert "secret" not in " ".join(router.arguments)


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
    }
    assert {f"--uds-path={tmp_path}/shard", "--listen-address=10.0.0.3"} < set(shards[1].arguments)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--node-rank=1"], "--node-rank is 1, so --num-nodes must be more than 1"),
        (["--num-nodes=2"], "--num-nodes needs --node-address: where the other machines reach this one"),
        (["--num-nodes=2", "--node-rank=2"], "--node-rank must be less than --num-nodes, which is 2"),
        (
            ["--num-nodes=2", "--node-rank=1", "--node-address=10.0.0.2"],
            "--node-rank needs --master-addr: the --node-address of node 0",
        ),
        (
            ["--num-nodes=2", "--node-address=0.0.0.0"],
            "--node-address (or NODE_ADDRESS): give one address of this machine, on a network that you trust, "
            "not all of them, got '0.0.0.0'",
        ),
    ],
)
def test_a_machine_that_does_not_know_its_place(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(*flags)
    assert capsys.readouterr().err == f"launcher: {reason}\n"


def test_a_flag_that_is_off_wins_over_the_variable_that_children_inherit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUST_REMOTE_CODE", "true")
    (shard,) = commands.shards(read("--no-trust-remote-code"), [tmp_path / "shard-0"])
    there = read_settings(ShardSettings, "shard", shard.arguments[shard.arguments.index("serve") + 1 :])
    assert not there.trust_remote_code
