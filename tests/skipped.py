"""Files of tests that are skipped as wholes: they are not imported, and count as one skipped entry each."""

from pathlib import Path

import pytest


class SkippedFile(pytest.Module):
    reason: str

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(self.reason, allow_module_level=True)


def skipped_file(parent: pytest.Collector, path: Path, reason: str) -> SkippedFile:
    """Returns what `pytest_pycollect_makemodule` returns for a file that is skipped."""
    file: SkippedFile = SkippedFile.from_parent(parent, path=path)
    file.reason = reason
    return file
