"""The metrics, and the server that a few can ask for them at a time."""

import socket
import urllib.request
from collections.abc import Iterator

import pytest

from llm_functionalities import metrics
from llm_functionalities.metrics import ServiceMetrics
from tests.timing import until


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(metrics, "SCRAPE_SECONDS", 0.5)
    collected = ServiceMetrics()
    collected.count_empty("deadline")
    port, stop = collected.serve("127.0.0.1", 0)
    yield port
    stop()


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        return str(response.read().decode())


def is_served(port: int) -> bool:
    try:
        return "llm_functionalities_calls_running" in scrape(port)
    except OSError:
        return False


def test_everything_that_is_counted_is_shown(port: int) -> None:
    assert 'llm_functionalities_empty_answers_total{reason="deadline"} 1.0' in scrape(port)


def test_connections_that_ask_nothing_are_closed_and_scrapes_come_again(port: int) -> None:
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(metrics.MOST_SCRAPES + 4)]
    for connection in connections:
        connection.settimeout(5)
    try:
        assert all(connection.recv(1) == b"" for connection in connections)
        until(lambda: is_served(port))
    finally:
        for connection in connections:
            connection.close()


def test_a_request_that_is_no_http_harms_nobody(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"\x00\xff\r\n\r\n")
    assert is_served(port)
