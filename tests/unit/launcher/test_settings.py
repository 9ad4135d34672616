"""The launcher's settings: TGI's flags and variables, and what is refused."""

import socket

import pytest

from shared.settings import read_settings
from tgi_server import demo_model
from tgi_server.launcher.settings import LauncherSettings

# TGI's launcher flags.
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


def read(*flags: str) -> LauncherSettings:
    return read_settings(LauncherSettings, "launcher", flags)


def test_every_flag_of_tgi_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    listed = capsys.readouterr().out
    assert [flag for flag in REFERENCE.split() if f"--{flag}" not in listed] == []


def test_the_help_says_what_the_launcher_makes_of_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    words = " ".join(capsys.readouterr().out.split())
    assert "--revision TEXT [REVISION] Branch, tag or commit of the model on the hub" in words
    assert "Medusa heads, or EAGLE-3" in words


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        (
            "quantize",
            "exl2",
            "must be one of awq, compressed-tensors, gptq, marlin, bitsandbytes, bitsandbytes-fp4, bitsandbytes-nf4, "
            "eetq, fp8, int4, int8; for other formats use a GPTQ checkpoint",
        ),
        ("kv-cache-dtype", "int8", "Input should be 'fp8_e4m3fn' or 'fp8_e5m2', got 'int8'"),
        ("rope-scaling", "linear", "not supported yet; set rope_parameters in the model's config.json"),
        ("rope-factor", "2", "not supported yet; set rope_parameters in the model's config.json"),
        ("weights-cache-override", "/a", "not supported; use the folder with the weights as the model id"),
    ],
)
def test_a_setting_that_is_not_supported_is_refused_by_name(
    flag: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        read(f"--{flag}={value}")
    assert end.value.code == 2
    assert capsys.readouterr().err == f"launcher: --{flag} (or {flag.replace('-', '_').upper()}): {reason}\n"


def test_a_value_that_asks_for_nothing_is_let_through() -> None:
    assert read("--quantize=gptq").quantize == "gptq"
    for value in ("on", "off", "no-stack"):
        assert read(f"--usage-stats={value}").usage_stats == value


def test_limits_that_do_not_fit_together_are_found_before_anything_is_fetched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read("--max-input-tokens=8", "--max-total-tokens=8")
    assert "--max-input-tokens (8) must be less than --max-total-tokens (8)" in capsys.readouterr().err


def test_a_port_that_nobody_would_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--port=0")
    assert "--port (or PORT): the launcher must know the port" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--node-rank=1"], "--node-rank is 1, so --num-nodes must be more than 1"),
        (["--num-nodes=2"], "--num-nodes needs --node-address: where the other machines reach this one"),
        (["--num-nodes=2", "--node-rank=2"], "--node-rank is 2; it must be less than --num-nodes, which is 2"),
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


def test_variables_of_sagemaker_stand_for_those_that_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODEL_ID", "hub/model")
    monkeypatch.setenv("SM_NUM_GPUS", "4")
    assert (read().model_id, read().num_shard) == ("hub/model", 4)
    monkeypatch.setenv("NUM_SHARD", "2")
    monkeypatch.setenv("MODEL_ID", "")
    assert (read().model_id, read().num_shard) == ("hub/model", 2)
    monkeypatch.setenv("MODEL_ID", "other/model")
    assert (read().model_id, read("--num-shard=3").num_shard) == ("other/model", 3)


def test_a_machine_of_sagemaker_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_NUM_GPUS", "0")
    assert read().num_shard is None


def test_short_flags_of_tgi() -> None:
    settings = read("-p", "81", "-g", "7")
    assert (settings.port, settings.graceful_termination_timeout) == (81, 7)


def test_prefix_caching_as_tgi_spells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read().prefix_caching
    monkeypatch.setenv("PREFIX_CACHING", "0")
    assert not read().prefix_caching


def test_room_for_one_request_at_least(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--max-total-tokens=100", "--max-batch-total-tokens=99")
    assert "--max-batch-total-tokens (99) must be at least --max-total-tokens (100)" in capsys.readouterr().err
