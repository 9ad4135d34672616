"""The health check on a command line."""

import subprocess
import sys
from collections.abc import Callable

from tests.integration.llm_functionalities.service import running_service


def check(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "llm_functionalities.healthcheck", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stderr


def test_the_exit_status_tells_whether_the_service_is_well(free_port: Callable[[], int]) -> None:
    with running_service() as service:
        assert check(service.address) == (0, "")
    status, said = check(f"127.0.0.1:{free_port()}")
    assert status == 1
    assert "does not answer: UNAVAILABLE" in said
    assert check() == (1, "usage: python -m llm_functionalities.healthcheck HOST:PORT\n")
