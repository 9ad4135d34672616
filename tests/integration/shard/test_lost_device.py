"""A device that computes nothing any more ends the whole server; on a CPU the loss is simulated."""

from pathlib import Path

import pytest

from tests.gpu.test_server import lose_device

LOST = """
def lost(engine):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

Engine.check_device = lost
lost(engine)
"""


@pytest.mark.slow
def test_a_device_that_is_lost_ends_the_server(server, tmp_path: Path) -> None:
    lose_device(server, tmp_path, LOST)
