from pathlib import Path

import pytest

from shared.settings import read_settings
from tgi_server.router.settings import ApiKey, RouterSettings

# Of the launcher's flags, those that concern the router, with TGI's defaults; None: each interface has its own, or the
# device decides.
DEFAULTS = {
    "max_concurrent_requests": None,
    "max_best_of": None,
    "max_stop_sequences": None,
    "max_top_n_tokens": None,
    "max_input_tokens": None,
    "max_total_tokens": None,
    "waiting_served_ratio": 0.3,
    "max_batch_total_tokens": None,
    "max_waiting_tokens": 20,
    "max_batch_size": None,
    "hostname": "0.0.0.0",
    "port": 3000,
    "prometheus_port": 9000,
    "master_shard_uds_path": "/tmp/text-generation-server-0",
    "tokenizer_config_path": None,
    "revision": None,
    "validation_workers": 2,
    "json_output": False,
    "otlp_endpoint": None,
    "cors_allow_origin": [],
    "api_key": None,
    "disable_grammar_support": False,
    "max_client_batch_size": None,
    "graceful_termination_timeout": 90,
}


def read(*arguments: str) -> RouterSettings:
    return read_settings(RouterSettings, "router", ["--tokenizer-name", "model", *arguments])


def test_defaults():
    settings = read()
    assert {name: getattr(settings, name) for name in DEFAULTS} == DEFAULTS
    assert settings.tokenizer_name == Path("model")


def test_flags_win_over_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MAX_STOP_SEQUENCES", "7")
    monkeypatch.setenv("PORT", "81")
    settings = read("--port", "82")
    assert (settings.max_stop_sequences, settings.port) == (7, 82)


def test_the_older_name_of_max_input_tokens(monkeypatch: pytest.MonkeyPatch):
    assert read("--max-input-length", "5").max_input_tokens == 5
    monkeypatch.setenv("MAX_INPUT_LENGTH", "6")
    assert read().max_input_tokens == 6


def test_lists_are_separated_by_commas():
    assert read("--cors-allow-origin", "http://a,http://b").cors_allow_origin == ["http://a", "http://b"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port", "many"], "--port"),
        (["--max-best-of", "0"], "--max-best-of"),
        (["--ngrok"], "--ngrok"),
        (["--max-input-tokens", "9", "--max-total-tokens", "9"], "--max-input-tokens (9)"),
        (["--port", "9000"], "--prometheus-port"),
        (["--log-level", "loud"], "--log-level"),
        (["--max-batch-prefill-tokens", "4294967296"], "--max-batch-prefill-tokens"),
        (["--max-batch-total-tokens", "4294967296"], "--max-batch-total-tokens"),
        (["--max-total-tokens", "4294967296"], "--max-total-tokens"),
        (["--max-concurrent-requests", "4294967296"], "--max-concurrent-requests"),
        (["--max-batch-size", "4294967296"], "--max-batch-size"),
        (["--max-loras", "99999999999999999999"], "--max-loras"),
        (["--client-timeout", "4294967296"], "--client-timeout"),
        (["--graceful-termination-timeout", "inf"], "--graceful-termination-timeout"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        read(*arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_key_has_no_line_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_KEY", "secret\n")
    assert read().api_keys == [ApiKey("secret")]


def test_the_api_key_is_not_printed():
    assert "secret" not in read("--api-key", "secret").describe()


def test_who_may_update_adapters_has_a_key_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    allow = "--allow-adapter-updates"
    for flags, told in (
        ([], "needs --api-key or --api-key-file"),
        (["--api-key=k"], "needs --adapter-root: the folder below which adapters may be loaded from, not None"),
        (["--api-key=k", "--adapter-root=/absent"], "may be loaded from, not /absent"),
    ):
        with pytest.raises(SystemExit):
            read(allow, *flags)
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        read("--api-key=k", f"--adapter-root={tmp_path}")
    assert "--adapter-root does nothing without --allow-adapter-updates" in capsys.readouterr().err
    assert read(allow, "--api-key=k", f"--adapter-root={tmp_path}").adapter_root == tmp_path


def test_adapters_are_read_from_flag_and_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("LORA_ADAPTERS", "maker/chef@v2,diy=/adapters/diy")
    assert [str(each) for each in read().lora_adapters] == ["maker/chef=maker/chef@v2", "diy=/adapters/diy"]
    with pytest.raises(SystemExit):
        read("--lora-adapters=a,a=b")
    assert "--lora-adapters (or LORA_ADAPTERS): the id 'a' is given twice" in capsys.readouterr().err
