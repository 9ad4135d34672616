"""The command `oatmill`, as a newcomer types it."""

import io
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import httpx
import pytest

from llm_functionalities.settings import Settings
from oatmill import doctor
from oatmill.cli import main
from oatmill.clients import variables
from oatmill.serve import shared_flags
from shared.settings import package_version, read_settings
from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.conftest import FreePort
from tests.servers import TextGenerationServer
from tgi_server import demo_model
from tgi_server.engine.kernels import build
from tgi_server.launcher.settings import LauncherSettings


@pytest.fixture
def oatmill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process. Returns exit code, standard output and standard error."""

    def run(*arguments: str, text: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["oatmill", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code: str | int | None = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return int(code or 0), out, err

    return run


def test_help_version_and_wrong_commands(oatmill):
    assert "oatmill serve [MODEL ...]" in oatmill("--help")[1]
    assert "text-generation-launcher" in oatmill("help")[1]
    assert "--max-total-tokens" in oatmill("help", "serve")[1]
    assert "usage: oatmill serve [MODEL ...] [--grpc-port PORT]" in oatmill("serve", "--help")[1]
    assert oatmill("demo", "-h")[:2] == oatmill("help", "demo")[:2]
    assert "usage: oatmill demo" in oatmill("help", "demo")[1]
    assert oatmill("version") == oatmill("--version") == (0, f"oatmill {package_version()}\n", "")
    wrong = "oatmill: there is no command 'server'; there are serve, chat, explain, demo, doctor\n"
    assert oatmill("server") == (2, "", wrong)
    assert (oatmill()[0], oatmill("demo", "fast")[0]) == (2, 2)
    assert "--grpc-port is 'x', which is not a port" in oatmill("serve", "--grpc-port", "x")[2]


def test_a_port_that_is_given_twice_or_in_use_is_found_at_once(oatmill):
    both = "oatmill serve: --port and --grpc-port are both 8080\n"
    assert oatmill("serve", "--grpc-port=8080") == (2, "", both)
    assert oatmill("serve", "--grpc-port=9000")[2] == "oatmill serve: --prometheus-port and --grpc-port are both 9000\n"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = oatmill("serve", f"--grpc-port={port}", "--hostname=127.0.0.1")
    assert (code, err) == (1, f"oatmill serve: port {port} is in use; choose another with --grpc-port\n")


def test_serve_passes_model_and_flags_on(tmp_path: Path):
    command = [sys.executable, "-m", "oatmill", "serve", str(tmp_path / "none"), "--max-total-token=3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("oatmill serve: unrecognized arguments: --max-total-token=3")


def test_serve_shows_how_to_point_clients_at_it():
    settings = LauncherSettings(model_id="maker/model", hostname="0.0.0.0", port=8081, api_key="secret")
    shown = variables(settings)
    assert "OPENAI_BASE_URL=http://127.0.0.1:8081/v1 OPENAI_API_KEY=YOUR_KEY\n" in shown
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:8081 ANTHROPIC_AUTH_TOKEN=YOUR_KEY ANTHROPIC_MODEL=maker/model" in shown
    assert "codex -m maker/model -c model_provider=oatmill" in shown
    assert "secret" not in shown
    named = LauncherSettings(model_id="maker/model", served_model_name=["a b"], hostname="::1")
    assert "ANTHROPIC_BASE_URL=http://[::1]:" in variables(named)
    assert "OPENAI_API_KEY=unused" in variables(named)
    assert "codex -m 'a b'" in variables(named)


def test_doctor_says_what_works_and_what_to_do(oatmill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    code, out, _ = oatmill("doctor")
    assert (code, out.endswith("\nready\n")) == (0, True), out
    assert f"CPU kernels: {build.compiled_library()}" in out
    monkeypatch.setattr(build, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(doctor, "_PORTS", {taken.getsockname()[1]: "--port"})
        code, out, _ = oatmill("doctor")
    assert (code, "no C++ compiler" in out, "choose another with --port" in out) == (0, True, True), out


def test_a_chat_streams_answers_and_remembers_the_conversation(oatmill, demo_server: TextGenerationServer):
    question = "How long do I boil an egg?\n"
    chat = ("chat", demo_server.url, "--temperature=0")
    code, out, err = oatmill(*chat, text=f"{question}/clear\n{question}{question}")
    assert (code, err) == (0, "")
    first, forgotten, remembered = (line for line in out.splitlines() if line)
    assert first == forgotten != remembered
    assert len(first.split()) > 2


def test_the_demo_model_answers_the_examples_of_chat_and_page(oatmill, demo_server: TextGenerationServer):
    facts = ("nail", "15 minutes", "whetstone", "margarine")
    page = (demo_model.PATH.parents[1] / "router/api/static/chat/welcome.js").read_text()
    for question, fact in zip(demo_model.EXAMPLES, facts, strict=True):
        # The model samples by default, and names butter in place of butter in three of a hundred answers.
        code, out, _ = oatmill("chat", demo_server.url, "--temperature=0", text=f"{question}\n/bye\nHello\n")
        assert (code, fact in out, "Hello" in out) == (0, True, False), out
        assert f'"{question}"' in page


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("8080", "http://127.0.0.1:8080"),
        ("gpu:81", "http://gpu:81"),
        ("https://models.example/v1/", "https://models.example"),
    ],
)
def test_a_chat_takes_a_port_and_the_url_of_openais_clients(oatmill, given: str, url: str, monkeypatch):
    made = []
    monkeypatch.setattr(
        "oatmill.server_client.httpx2.Client", lambda base_url, **_: made.append(base_url) or nullcontext()
    )
    assert oatmill("chat", given)[0] == 0
    assert made == [url]


def test_a_chat_says_why_there_is_no_answer(oatmill, demo_server: TextGenerationServer, free_port: FreePort):
    code, _, err = oatmill("chat", f"127.0.0.1:{free_port()}", text="Hello\n")
    assert (code, "`oatmill serve` starts a server there" in err) == (1, True)
    code, _, err = oatmill("chat", f"{demo_server.url}/metrics", text="Hello\n")
    assert (code, "status 404" in err) == (1, True)


def test_a_prompt_that_was_computed_again_is_explained(oatmill, demo_server: TextGenerationServer):
    for minute in (0, 1):
        system = f"It is 12:3{minute}. You answer in one short sentence, and only about cooking and about tools."
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "How long do I boil an egg?"}]
        body = {"messages": messages, "max_tokens": 2, "cache_salt": "explained"}
        answer = httpx.post(f"{demo_server.url}/v1/chat/completions", json=body)
    request_id = answer.headers["x-request-id"]
    code, out, _ = oatmill("explain", request_id, demo_server.url, "--cache-salt=explained")
    assert (code, "cause: changed" in out) == (0, True), out
    assert "messages[0], character 10" in out
    assert "It is 12:31. You" in out
    assert "It is 12:30. You" in out
    code, _, err = oatmill("explain", request_id, demo_server.url)
    assert (code, "nothing is remembered of a request" in err) == (1, True)


def test_a_chat_waits_until_the_model_is_loaded(oatmill):
    answers = iter([(503, b'{"error":{"message":"Loading model, 50 %: packing weights"}}')] * 2)
    done = (200, b'data:{"choices":[{"delta":{"content":"Hello"}}]}\n\ndata:[DONE]\n\n')

    class Loading(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            status, body = next(answers, done)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Loading) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = oatmill("chat", f"http://127.0.0.1:{server.server_port}", text="Hi\n")
        server.shutdown()
    assert (result[0], result[1].strip()) == (0, "Hello")
    assert result[2].count("Loading model, 50 %: packing weights") == 1


@pytest.mark.slow
def test_a_chat_in_a_terminal_ends_with_ctrl_d(demo_server: TextGenerationServer):
    ours, theirs = pty.openpty()
    seen = b""
    process = subprocess.Popen([sys.executable, "-m", "oatmill", "chat", demo_server.url], stdin=theirs, stdout=theirs)
    try:
        os.write(ours, b"How long do I boil an egg?\n")
        while seen.count(b"> ") < 2:  # the prompt behind the answer
            seen += os.read(ours, 4096)
        assert b"3.5 million parameters" in seen
        assert demo_model.EXAMPLES[0].encode() in seen
        os.write(ours, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)


def test_both_services_share_the_settings_that_they_have_in_common():
    common = LauncherSettings.model_fields.keys() & Settings.model_fields.keys()
    given = {
        "log_level": "DEBUG",
        "json_output": True,
        "max_connections": 7,
        "otlp_endpoint": "http://otel:4317",
    }
    assert common - given.keys() == {"port", "otlp_service_name"}  # each service has its own
    ours = read_settings(Settings, "gRPC", shared_flags(LauncherSettings(hostname="::1", **given)))
    assert {name: getattr(ours, name) for name in given} == given
    assert ours.listen_address == "[::1]"


@pytest.mark.slow
def test_serve_runs_both_services_on_one_address_with_one_key_and_stops_both(free_port, tmp_path: Path):
    http_port, grpc_port = free_port(), free_port()
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    flags = [f"--port={http_port}", f"--grpc-port={grpc_port}", "--prometheus-port=0", f"--api-key-file={keys}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "oatmill", "serve", *flags, "--hostname=127.0.0.2"], stdout=subprocess.DEVNULL
    )
    try:
        transport = httpx.HTTPTransport(retries=10)
        with httpx.Client(transport=transport, timeout=5) as client:
            while True:
                try:
                    if client.get(f"http://127.0.0.2:{http_port}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    assert process.poll() is None
        with grpc.insecure_channel(f"127.0.0.2:{grpc_port}") as channel:
            request = llm_pb2.ModelRequest(formatted_prompt="How do I boil an egg?", max_tokens=5, timeout=60_000)
            assert llm_pb2_grpc.LLMRunnerStub(channel).call_model(request, wait_for_ready=True).text
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", grpc_port), timeout=5)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
