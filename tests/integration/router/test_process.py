"""text-generation-router as a process: its start, its end, and what it says when it cannot start."""

import json
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.conftest import FreePort
from tests.integration.router.conftest import shard_process
from tests.integration.router.process import READY_SECONDS, Process, Start
from tests.timing import until
from tgi_server.launcher.processes.sockets import is_listening
from tgi_server.loading import READING, write_progress


def last_line(process: Process) -> str:
    line = process.lines()[-1]
    assert line.startswith("text-generation-router: ")
    assert "Traceback" not in process.log.read_text()
    return line


@pytest.mark.slow
def test_limits_that_do_not_fit(start: Start, flags: tuple[str, list[str]]):
    process = start(*flags[1], "--max-total-tokens=1000000")
    assert process.wait() == 1
    assert "--max-total-tokens is 1000000" in last_line(process)


def test_a_signal_before_it_is_ready(start: Start, flags: tuple[str, list[str]], tmp_path: Path):
    process = start(*flags[1], f"--master-shard-uds-path={tmp_path / 'absent'}", "--log-level=DEBUG")
    deadline = time.monotonic() + READY_SECONDS
    while not any("settings:" in line for line in process.lines()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)  # it waits for the shard now
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert "Traceback" not in process.log.read_text()


def test_while_the_shards_load_every_request_hears_how_far_they_are(
    start: Start, flags: tuple[str, list[str]], tmp_path: Path
):
    url, arguments = flags
    path = tmp_path / "shard-0"
    process = start(*arguments, f"--master-shard-uds-path={path}")

    def response(route: str = "/health") -> httpx.Response | None:
        assert process.popen.poll() is None, process.log.read_text()
        try:
            return httpx.get(f"{url}{route}", timeout=5)
        except httpx.TransportError:
            return None

    until(lambda: response() is not None)
    write_progress(path, 40, READING)
    refusal = httpx.post(f"{url}/v1/chat/completions", json={"messages": []}, timeout=5)
    assert refusal.status_code == 503
    assert refusal.json()["error"]["message"] == "Loading model, 40 %: reading weights"
    health = response()
    assert health is not None
    assert (health.status_code, health.headers["retry-after"]) == (503, "5")
    assert health.json()["error"] == "Loading model, 40 %: reading weights"
    with shard_process(path):
        process.until_ready(url)
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}
        assert httpx.post(f"{url}/generate", json=body, timeout=30).status_code == 200
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_running_requests_are_finished(start: Start, flags: tuple[str, list[str]]):
    url, arguments = flags
    process = start(*arguments).until_ready(url)
    answers: list[httpx.Response] = []

    def whole() -> None:
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 100}}
        answers.append(httpx.post(f"{url}/generate", json=body, timeout=30))

    def streamed() -> None:
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 100, "details": True}}
        with httpx.stream("POST", f"{url}/generate_stream", json=body, timeout=30) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data:")]
        if json.loads(lines[-1].removeprefix("data:"))["details"]["generated_tokens"] == 100:
            answers.append(response)

    def refused() -> bool:
        try:
            httpx.get(f"{url}/health")
        except httpx.ConnectError:
            return True
        return False

    clients = [threading.Thread(target=client) for client in (whole, streamed)]
    for client in clients:
        client.start()
    until(lambda: "tgi_batch_current_size 2.0" in httpx.get(f"{url}/metrics").text)
    process.popen.send_signal(signal.SIGTERM)
    until(refused)
    for client in clients:
        client.join(30)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert process.wait() == 0
    assert "stopped" in process.lines()[-1]


@pytest.mark.slow
def test_the_time_to_finish_is_bounded(start: Start, flags: tuple[str, list[str]]):
    url, arguments = flags
    process = start(*arguments, "--graceful-termination-timeout=1").until_ready(url)
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3000, "ignore_eos": True}}
    with httpx.stream("POST", f"{url}/generate_stream", json=body, timeout=30) as response:
        next(response.iter_lines())
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert "Traceback" not in process.log.read_text()


@pytest.mark.slow
def test_who_asks_it_to_stop_again_and_again_does_not_make_it_fail(start: Start, flags: tuple[str, list[str]]):
    url, arguments = flags
    process = start(*arguments).until_ready(url)
    while process.popen.poll() is None:
        process.popen.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert process.wait() == 0
    assert "Traceback" not in process.log.read_text()


def test_what_a_running_router_shows(start: Start, flags: tuple[str, list[str]], free_port: FreePort, tmp_path: Path):
    """Metrics on a port of their own, log lines as JSON, to its launcher that it serves; it has not loaded torch."""
    url, arguments = flags
    port = free_port()
    process = start(*arguments, f"--prometheus-port={port}", "--json-output", f"--ready-uds-path={tmp_path / 'ready'}")
    process.until_ready(url)
    until(lambda: is_listening(tmp_path / "ready"))
    httpx.post(f"{url}/generate", json={"inputs": "Hello", "parameters": {"max_new_tokens": 2}}, timeout=30)
    for base in (url, f"http://127.0.0.1:{port}"):
        assert "tgi_request_success 1.0" in httpx.get(f"{base}/metrics").text
    until(lambda: "/generate answered" in process.log.read_text())
    line = json.loads(process.lines()[-1])
    assert (line["message"], line["level"], line["generated_tokens"]) == ("/generate answered", "INFO", 2)
    assert 0 < line["time_per_token"] <= line["inference_time"] < 60_000
    maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
    assert "tokenizers" in maps
    assert "libtorch" not in maps
