"""What all tests share: the option --runslow, and servers on free ports."""

import socket
from collections.abc import Callable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run the tests that take long, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--runslow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: needs --runslow"))


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A port of 127.0.0.1 that nobody listens on, another one at each call."""
    given: set[int] = set()

    def find() -> int:
        while True:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port: int = probe.getsockname()[1]
            if port not in given:
                given.add(port)
                return port

    return find
