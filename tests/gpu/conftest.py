"""Skips the files of this folder as wholes where there is no CUDA device."""

from pathlib import Path

import pytest

from tests.skipped import skipped_file


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    import torch

    if torch.cuda.is_available():
        return None
    return skipped_file(parent, module_path, "all of tests/gpu: needs a CUDA device")
