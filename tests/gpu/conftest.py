"""Skips the files of this folder as wholes where there is no CUDA device."""

from pathlib import Path

import pytest


class SkippedFile(pytest.Module):
    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip("all of tests/gpu: needs a CUDA device", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    import torch

    return None if torch.cuda.is_available() else SkippedFile.from_parent(parent, path=module_path)
