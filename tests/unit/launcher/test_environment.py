"""Facts for a bug report."""

import platform
from importlib.metadata import version

import pytest

from tgi_server.launcher import environment
from tgi_server.launcher.environment import describe_environment


def test_every_fact_has_a_line() -> None:
    facts = dict(line.split(": ", 1) for line in describe_environment().splitlines() if ": " in line)
    assert facts["python"].startswith(platform.python_version())
    assert facts["grpcio"] == version("grpcio")
    assert "cores" in facts["cpu"]
    assert "available" in facts["memory"]


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    assert "no-such-package: not installed" in describe_environment()
