import pytest

from llm_functionalities.settings import Settings
from shared.settings import read_settings


def read(*flags: str) -> Settings:
    return read_settings(Settings, "llm-functionalities", flags)


@pytest.mark.parametrize("flag", ["--endpoint", "--inference-endpoint-url"])
def test_endpoints_by_flag(flag: str) -> None:
    assert read(flag, "tgi:80, https://models.example/tgi/").inference_endpoint_url == [
        "http://tgi:80",
        "https://models.example:443/tgi",
    ]


def test_endpoints_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_ENDPOINT_URL", "tgi:80")
    assert read().inference_endpoint_url == ["http://tgi:80"]
    assert read("--endpoint", "other").inference_endpoint_url == ["http://other:80"]
    monkeypatch.setenv("INFERENCE_ENDPOINT_URL", "")
    assert read().inference_endpoint_url == []


@pytest.mark.parametrize(("threads", "of_batches"), [("64", 32), ("5", 3), ("1", 1)])
def test_batches_hold_half_of_the_threads(threads: str, of_batches: int) -> None:
    assert read("--threads", threads).batch_threads == of_batches


def test_a_token_has_no_line_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDPOINT_TOKEN", "secret\n")
    assert read().endpoint_token == "secret"


def test_a_secret_is_not_described() -> None:
    assert "s3cret" not in read("--endpoint-token", "s3cret").describe()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--endpoint", "ftp://tgi"], "--inference-endpoint-url"),
        (["--endpoint", "http://me:secret@tgi"], "--endpoint-token"),
        (["--prot", "8000"], "--prot"),
        (["--port", "eighty"], "--port"),
        (["--port", "70000"], "--port"),
        (["--tls-cert", __file__], "--tls-key"),
        (["--tls-client-ca", __file__], "--tls-cert"),
        (["--endpoint-ca", "/absent"], "/absent"),
        (["--name-servers", "dns.example"], "--name-servers"),
        (["--default-timeout", "-1"], "--default-timeout"),
        (["--port", "9100", "--metrics-port", "9100"], "--port and --metrics-port are both 9100"),
        (["--threads", "0"], "--threads"),
        (["--ladder-models", "large"], "NAME=ENDPOINT"),
        (["--ladder-models", "big one=tgi:80"], "'big one' is not a name"),
        (["--ladder-models", "large=ftp://tgi"], "--ladder-models"),
        (["--ladder-models", "large=tgi:80#"], "no model after the #"),
        (["--ladder-models", "a=tgi:80,a=tgi:80"], "the same entry twice"),
        (["--ladder-models", "large=tgi:80", "--ladder", "large,small"], "'small'"),
        (["--ladder-models", "large=tgi:80", "--ladder", "large,large"], "twice"),
        (["--threads", "4", "--batch-threads", "8"], "--batch-threads"),
        (["--log-level", "loud"], "--log-level"),
        (["--max-timeout", "inf"], "--max-timeout"),
        (["--receive-timeout", "3000000"], "--receive-timeout"),
        (["--keepalive-time", "3000000"], "--keepalive-time"),
        (["--max-message-bytes", "4294967296"], "--max-message-bytes"),
        (["--max-concurrent-calls", "4294967296"], "--max-concurrent-calls"),
        (["--max-connections", "4294967296"], "--max-connections"),
        (
            ("--hedge-after-ms", "0"),
            "give milliseconds, at most 1000000000, or p95",
        ),
        (("--hedge-after-ms", "p99"), "--hedge-after-ms (or HEDGE_AFTER_MS): give milliseconds"),
        (("--endpoint", "a:80,b", "--fallback-endpoint", "a"), "--fallback-endpoint is one of the model servers"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        read(*flags)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert complaint in said
