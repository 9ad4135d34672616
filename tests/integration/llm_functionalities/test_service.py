"""The service as a process: how it starts, connects, is watched, protects itself, and stops."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.fakes.model_server import ModelServer
from tests.fakes.name_server import NameServer
from tests.integration.llm_functionalities.service import Service, ask, reason, running_service
from tests.timing import SECONDS, on_a_busy_machine, until


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture
def absent() -> ModelServer:
    """A model server that is not there yet, on a port that is known."""
    with ModelServer() as server:
        pass
    return server


def test_a_service_without_an_endpoint_starts_and_answers_empty() -> None:
    with running_service() as service, service.runner() as runner:
        assert reason(runner) == ("", "no_endpoint")
        batch = runner.batch_call_model(llm_pb2.ModelBatchRequest(formatted_prompts=["a", "b", "c"]))
        assert list(batch.text) == ["", "", ""]
        assert list(runner.stream_model(llm_pb2.ModelRequest(formatted_prompt="a"))) == []
    assert any("empty answer" in line and "INFERENCE_ENDPOINT_URL" in line for line in service.log)
    assert sum("no endpoint is set" in line for line in service.log) == 1


def readiness(service: Service) -> int:
    with service.channel() as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        assert check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        return int(check(health_pb2.HealthCheckRequest(service="readiness")).status)


@pytest.mark.slow
def test_a_service_is_ready_while_an_endpoint_may_be_there(absent: ModelServer) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    with running_service() as service:
        assert readiness(service) == not_serving
    with running_service("--endpoint", absent.url) as service, service.runner() as runner:
        assert readiness(service) == serving
        ask(runner)
        until(lambda: readiness(service) == not_serving)
        with absent:
            until(lambda: readiness(service) == serving)


@on_a_busy_machine
def test_an_endpoint_that_comes_later_is_used_without_a_restart(absent: ModelServer) -> None:
    with running_service(INFERENCE_ENDPOINT_URL=absent.url) as service, service.runner() as runner:
        assert reason(runner) == ("", "unreachable")
        assert reason(runner) == ("", "circuit_open")
        with absent:
            assert until(lambda: ask(runner) == "a fine answer") < 2
        until(lambda: ask(runner) == "")
        with absent:
            assert until(lambda: ask(runner) == "a fine answer") < 2
    news = [
        line for line in service.log if (" is unavailable" in line and "empty answer" not in line) or " is back" in line
    ]
    assert ["back" if "is back" in line else "away" for line in news] == ["away", "back", "away", "back"]


@pytest.mark.slow
@on_a_busy_machine
def test_a_dead_endpoint_costs_the_next_caller_nothing(absent: ModelServer) -> None:
    with running_service("--endpoint", absent.url) as service, service.runner() as runner:
        ask(runner)
        started = time.monotonic()
        for _ in range(100):
            ask(runner)
        assert time.monotonic() - started < 1.0


@pytest.mark.slow
def test_nothing_is_tried_before_the_first_request(server: ModelServer) -> None:
    with running_service("--endpoint", server.url) as service:
        time.sleep(0.5)
        assert server.connections == 0
        with service.runner() as runner:
            assert ask(runner) == "a fine answer"
        assert server.connections == 1
        assert server.health_checks == 0


@pytest.mark.slow
def test_connections_are_kept_for_the_next_request(server: ModelServer) -> None:
    with running_service("--endpoint", server.url) as service, service.runner() as runner:
        for _ in range(10):
            ask(runner)
        assert server.connections == 1


@pytest.mark.slow
def test_a_host_name_is_resolved_by_the_name_server_it_is_told(server: ModelServer) -> None:
    with NameServer({"tgi.": [("A", "127.0.0.1")]}) as names:
        flags = ("--endpoint", f"tgi:{server.port}", "--name-servers", f"127.0.0.1:{names.port}")
        with running_service(*flags) as service, service.runner() as runner:
            assert ask(runner) == "a fine answer"
        assert server.requests[0].headers["host"] == f"tgi:{server.port}"


@pytest.mark.slow
@on_a_busy_machine
def test_a_resolver_that_never_answers_is_bounded(server: ModelServer) -> None:
    with NameServer() as names:
        names.mode = "silent"
        flags = ("--endpoint", f"tgi:{server.port}", "--name-servers", f"127.0.0.1:{names.port}")
        with running_service(*flags, "--resolve-timeout", "0.5") as service, service.runner() as runner:
            started = time.monotonic()
            assert reason(runner, timeout_ms=5000) == ("", "unresolvable")
            assert time.monotonic() - started < 0.6
            started = time.monotonic()
            assert reason(runner) == ("", "circuit_open")
            assert time.monotonic() - started < 0.1
            names.records["tgi."] = [("A", "127.0.0.1")]
            names.mode = "answer"
            assert until(lambda: ask(runner) == "a fine answer") < 2


@pytest.mark.slow
def test_an_ipv6_endpoint() -> None:
    with (
        ModelServer(host="::1") as server,
        running_service("--endpoint", f"[::1]:{server.port}") as service,
        service.runner() as runner,
    ):
        assert ask(runner) == "a fine answer"


@pytest.mark.slow
def test_localhost_is_tried_at_both_addresses() -> None:
    with ModelServer(host="::1") as server, running_service("--endpoint", f"localhost:{server.port}") as service:
        hosts = Path("/etc/hosts").read_text()
        if "localhost" in hosts and not re.search(r"^::1\s.*\blocalhost\b", hosts, re.MULTILINE):
            pytest.skip("this machine's /etc/hosts knows localhost as 127.0.0.1 only")
        with service.runner() as runner:
            assert ask(runner) == "a fine answer"


@pytest.mark.slow
def test_of_the_environment_only_what_is_meant_for_it_is_used(server: ModelServer) -> None:
    environment = {"ENDPOINT_TOKEN": "s3cret", "HF_TOKEN": "hf_private", "HTTP_PROXY": "http://127.0.0.1:9"}
    with running_service("--endpoint", server.url, **environment) as service, service.runner() as runner:
        assert ask(runner) == "a fine answer"
    assert server.requests[0].headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in "\n".join(service.log)


@pytest.mark.slow
def test_a_hugging_face_token_of_the_machine_stays_there(server: ModelServer) -> None:
    with running_service("--endpoint", server.url, HF_TOKEN="hf_private") as service, service.runner() as runner:
        assert ask(runner) == "a fine answer"
    assert "hf_private" not in str(server.requests[0].headers)


@pytest.mark.slow
def test_two_endpoints_share_the_prompts_by_their_beginnings() -> None:
    with (
        ModelServer() as one,
        ModelServer() as other,
        running_service("--endpoint", f"{one.url},{other.url}") as service,
        service.runner() as runner,
    ):
        for turn in range(3):
            for conversation in range(12):
                assert ask(runner, f"conversation {conversation}\n" * 40 + f"turn {turn}") == "a fine answer"
    for here, there in ((one, other), (other, one)):
        beginnings = {prompt.split("\n")[0] for prompt in here.prompts}
        assert beginnings
        assert not beginnings & {prompt.split("\n")[0] for prompt in there.prompts}


@pytest.mark.parametrize(
    "fault", [pytest.param("absent", marks=pytest.mark.slow), pytest.param("hang", marks=pytest.mark.slow), 503]
)
def test_requests_move_away_from_an_endpoint_that_fails(fault: str | int) -> None:
    with (
        ModelServer() as good,
        ModelServer() as bad,
        running_service("--endpoint", f"{good.url},{bad.url}") as service,
        service.runner() as runner,
    ):
        if fault == "absent":
            bad.kill()
        bad.fault = fault

        def all_answered() -> bool:
            return all(ask(runner, f"prompt {number}", 200) for number in range(20))

        assert until(all_answered, 15) < 10
        before = len(bad.requests)
        assert all_answered()
        assert len(bad.requests) == before
        bad.fault = None
        if fault == "absent":
            bad.start()
        until(lambda: all_answered() and len(bad.requests) > before)


@on_a_busy_machine
def test_a_call_that_sets_no_time_gets_the_default(server: ModelServer) -> None:
    server.fault = "hang"
    flags = ("--endpoint", server.url, "--default-timeout", "0.3")
    with running_service(*flags) as service, service.runner() as runner:
        begun = time.monotonic()
        assert reason(runner, timeout_ms=0) == ("", "deadline")
        assert time.monotonic() - begun < 0.5
        batch = runner.batch_call_model.future(llm_pb2.ModelBatchRequest(formatted_prompts=["x", "y"]))
        assert list(batch.result(timeout=SECONDS).text) == ["", ""]


def test_health_and_reflection() -> None:
    with running_service() as service, service.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "LLMRunner"):
            request = health_pb2.HealthCheckRequest(service=name)
            assert health.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        names = {entry.name for entry in answer.list_services_response.service}
        assert {name for name in names if name.startswith("LLM")} == {
            "LLMRunner",
            "LLMDecisions",
            "LLMEmbeddings",
            "LLMPrefixCache",
            "LLMChitChat",
            "LLMSummaryGeneration",
            "LLMDescriptionGeneration",
            "LLMProactiveQuestionGeneration",
            "LLMReplacementGeneration",
            "LLMExecutionSearchManager",
        }
        assert "grpc.health.v1.Health" in names


def test_more_calls_than_it_takes_are_refused_and_health_is_not(server: ModelServer) -> None:
    server.delay = 5
    flags = ("--endpoint", server.url, "--max-concurrent-calls", "4")
    with running_service(*flags) as service, service.channel() as channel:
        runner = llm_pb2_grpc.LLMRunnerStub(channel)
        request = llm_pb2.ModelRequest(formatted_prompt="x", timeout=10_000)
        calls = [runner.call_model.future(request) for _ in range(4)]
        until(lambda: len(server.requests) == 4)
        with pytest.raises(grpc.RpcError) as refusal:
            runner.call_model(request)
        assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as refusal:
            list(runner.stream_model(request))
        assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        for call in calls:
            call.cancel()
        server.delay = 0
        until(lambda: _is_answered(runner))


def _is_answered(runner: llm_pb2_grpc.LLMRunnerStub) -> bool:
    try:
        return ask(runner) == "a fine answer"
    except grpc.RpcError:
        return False


def test_message_sizes_are_limited(server: ModelServer) -> None:
    flags = ("--endpoint", server.url, "--max-message-bytes", "10000")
    with running_service(*flags) as service, service.runner() as runner:
        assert ask(runner, "x" * 9000) == "a fine answer"
        with pytest.raises(grpc.RpcError) as refusal:
            ask(runner, "x" * 11_000)
        assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        server.answer = "y" * 20_000
        assert reason(runner) == ("", "bad_answer")


def test_metrics(server: ModelServer, free_port: Callable[[], int]) -> None:
    port = free_port()
    with running_service("--endpoint", server.url, "--metrics-port", str(port)) as service:
        with service.runner() as runner:
            ask(runner)
            ask(runner)
            server.fault = 500
            ask(runner)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            metrics = response.read().decode()
    for line in (
        'llm_functionalities_calls_total{method="/LLMRunner/call_model",status="OK"} 3.0',
        'llm_functionalities_empty_answers_total{reason="server_error"} 1.0',
        'llm_functionalities_call_seconds_count{method="/LLMRunner/call_model"} 3.0',
        f'llm_functionalities_endpoint_up{{endpoint="{server.url}"}} 1.0',
        f'llm_functionalities_endpoint_requests{{endpoint="{server.url}"}} 0.0',
        "llm_functionalities_calls_running 0.0",
        "llm_functionalities_prompts_waiting 0.0",
    ):
        assert line in metrics.splitlines(), metrics
    assert "llm_functionalities_event_loop_lag_seconds_count " in metrics


def test_late_requests_go_to_the_fallback_too_and_refused_ones_go_there_alone(
    server: ModelServer, free_port: Callable[[], int]
) -> None:
    port = free_port()
    server.sick = False
    with (
        ModelServer() as fallback,
        running_service(
            *("--endpoint", server.url, "--fallback-endpoint", fallback.url),
            *("--hedge-after-ms", "1000", "--hedge-budget", "0.5", "--metrics-port", str(port)),
        ) as service,
        service.runner() as runner,
    ):
        fallback.answer = "from the fallback"
        assert ask(runner) == "a fine answer"
        server.fault = "hang"
        assert ask(runner) == "from the fallback"
        assert server.requests[-1].abandoned.wait(5)
        server.fault = 429
        assert ask(runner) == "from the fallback"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            metrics = response.read().decode().splitlines()
    assert 'llm_functionalities_hedges_total{outcome="won"} 1.0' in metrics
    assert "llm_functionalities_fallbacks_total 1.0" in metrics
    assert f'llm_functionalities_endpoint_up{{endpoint="{fallback.url}"}} 1.0' in metrics


@pytest.mark.slow
def test_logs_for_machines() -> None:
    with running_service("--json-output") as service:
        assert service.port
    lines = [json.loads(line) for line in service.log]
    assert [line["message"].split()[0] for line in lines] == ["settings:", "no", "listening", "stopping", "stopped"]


@pytest.mark.slow
def test_a_running_call_may_end_before_the_service_does(server: ModelServer) -> None:
    server.delay = 1
    with running_service("--endpoint", server.url) as service, service.runner() as runner:
        call = runner.call_model.future(llm_pb2.ModelRequest(formatted_prompt="x"))
        until(lambda: len(server.requests) == 1)
        service.process.terminate()
        assert call.result().text == "a fine answer"


@pytest.mark.slow
def test_who_asks_it_to_stop_again_and_again_does_not_make_it_fail() -> None:
    with running_service() as service:
        while service.process.poll() is None:
            service.process.terminate()
            time.sleep(0.01)


@pytest.mark.slow
@on_a_busy_machine
def test_the_grace_ends_too(server: ModelServer) -> None:
    server.fault = "hang"
    with running_service("--endpoint", server.url, "--grace", "0.5") as service, service.runner() as runner:
        call = runner.call_model.future(llm_pb2.ModelRequest(formatted_prompt="x", timeout=60_000))
        until(lambda: len(server.requests) == 1)
        started = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - started < 3
        assert call.exception() is not None
        assert server.requests[0].abandoned.wait(SECONDS)


def started(*flags: str) -> tuple[int, str]:
    """The exit status and the words of a service that cannot start."""
    command = [sys.executable, "-m", "llm_functionalities", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.returncode, done.stderr


def test_a_wrong_setting_is_one_clear_line() -> None:
    status, said = started("--endpoint", "ftp://tgi")
    assert status == 2
    assert said.count("\n") == 1
    assert "ftp://tgi" in said


@pytest.mark.parametrize("flag", ["--port", pytest.param("--metrics-port", marks=pytest.mark.slow)])
def test_a_port_in_use_is_one_clear_line(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = started("--listen-address", "127.0.0.1", "--port", "0", flag, str(port))
    assert status == 1
    assert str(port) in said.splitlines()[-1]
    assert "Traceback" not in said


class Certificates:
    """A certificate authority of our own, and what it signed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca = folder / "ca.pem"
        self._openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test CA", "-days", "2",
                      "-keyout", folder / "ca.key", "-out", self.ca)  # fmt: skip

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate for localhost and 127.0.0.1, and its key."""
        key, request, certificate = (self._folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        extensions = self._folder / "extensions"
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        self._openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        self._openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._folder / "ca.key", "-days", "2",
                      "-extfile", extensions, "-out", certificate)  # fmt: skip
        return certificate, key

    def _openssl(self, *arguments: "str | Path") -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("flag", ["--tls-key", pytest.param("--tls-client-ca", marks=pytest.mark.slow)])
def test_a_file_without_the_right_key_or_certificate_is_one_clear_line(certificates: Certificates, flag: str) -> None:
    certificate, key = certificates.issue("service")
    _, another = certificates.issue("another")
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key), flag, str(another))
    status, said = started("--port", "0", *flags)
    assert status == 1
    assert f"{flag} {another}" in said.splitlines()[-1]
    assert "Traceback" not in said


def test_tls_and_mutual_tls(certificates: Certificates) -> None:
    certificate, key = certificates.issue("service")
    client_certificate, client_key = certificates.issue("client")
    root = certificates.ca.read_bytes()
    flags = ["--tls-cert", str(certificate), "--tls-key", str(key)]

    def status(service: Service, credentials: grpc.ChannelCredentials) -> grpc.StatusCode:
        with grpc.secure_channel(f"localhost:{service.port}", credentials) as channel:
            call = llm_pb2_grpc.LLMRunnerStub(channel).call_model.future(llm_pb2.ModelRequest(), timeout=SECONDS)
            return call.code()

    anonymous = grpc.ssl_channel_credentials(root)
    known = grpc.ssl_channel_credentials(root, client_key.read_bytes(), client_certificate.read_bytes())
    with running_service(*flags) as service:
        assert status(service, anonymous) == grpc.StatusCode.OK
        assert status(service, grpc.ssl_channel_credentials()) == grpc.StatusCode.UNAVAILABLE
    with running_service(*flags, "--tls-client-ca", str(certificates.ca)) as service:
        assert status(service, known) == grpc.StatusCode.OK
        assert status(service, anonymous) == grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
@on_a_busy_machine
def test_an_https_endpoint_is_checked_with_its_own_authority(certificates: Certificates) -> None:
    certificate, key = certificates.issue("endpoint")
    with ModelServer(tls=(certificate, key)) as server:
        url = f"https://localhost:{server.port}"
        with running_service("--endpoint", url) as service, service.runner() as runner:
            assert reason(runner) == ("", "unreachable")
        assert any("CERTIFICATE_VERIFY_FAILED" in line for line in service.log)
        flags = ("--endpoint", url, "--endpoint-ca", str(certificates.ca))
        with running_service(*flags) as service, service.runner() as runner:
            assert ask(runner) == "a fine answer"
            server.fault = "hang"
            begun = time.monotonic()
            assert reason(runner, timeout_ms=300) == ("", "deadline")
            assert time.monotonic() - begun < 0.35
            call = runner.call_model.future(llm_pb2.ModelRequest(formatted_prompt="x"))
            until(lambda: len(server.requests) == 3)
            call.cancel()
            assert server.requests[-1].abandoned.wait(SECONDS)
