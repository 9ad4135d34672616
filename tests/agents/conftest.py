"""Skips the files of this folder as wholes unless `--agents` is given: agents are fetched from their registries."""

from pathlib import Path

import pytest

from tests.skipped import skipped_file


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if parent.config.getoption("agents"):
        return None
    return skipped_file(parent, module_path, "all of tests/agents: agents from their registries; make agents")
