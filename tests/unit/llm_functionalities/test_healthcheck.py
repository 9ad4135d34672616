"""The health check's exit status, and its line on standard error, tell if a service is well."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from llm_functionalities import healthcheck

Service = tuple[str, health.HealthServicer]


@pytest.fixture
def service() -> Iterator[Service]:
    """The address of a health service, and what it tells."""
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(0)


def outcome(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Returns None for a service that is well, else the line that the interpreter prints before it exits with 1."""
    monkeypatch.setattr("sys.argv", ["healthcheck", *arguments])
    try:
        healthcheck.main()
    except SystemExit as end:
        return end.code
    return None


def test_a_service_that_serves_is_well(monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    address, servicer = service
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert outcome(monkeypatch, address) is None


def test_a_service_that_stops_is_not_well(monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    address, servicer = service
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert outcome(monkeypatch, address) == f"{address} is NOT_SERVING"


def test_readiness_is_a_question_of_its_own(monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    address, servicer = service
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    servicer.set("readiness", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert outcome(monkeypatch, address, "readiness") == f"{address} is NOT_SERVING"


def test_a_service_that_is_away_is_not_well(monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert outcome(monkeypatch, address) == f"{address} does not answer: UNAVAILABLE"


def test_without_an_address_the_usage_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(monkeypatch) == "usage: python -m llm_functionalities.healthcheck HOST:PORT [SERVICE]"
