"""What a GPU is full with, by its memory and its speed."""

import pytest

from tgi_server.engine.runners.caps import Caps, caps_of_gpu

GB = 10**9


@pytest.mark.parametrize(
    ("free_bytes", "token_bytes", "token_us", "caps"),
    [
        (100 * GB, 131_072, 23.5, Caps(416, 8192)),  # a model of 8B on an H200
        (100 * GB, 131_072, 15.0, Caps(512, 16_384)),  # the same with weights in FP8
        (40 * GB, 131_072, 23.5, Caps(288, 8192)),  # room for 298 sequences of 1,024 tokens
        (5 * GB, 131_072, 83.0, Caps(128, 2048)),  # a small GPU: no fewer sequences than on a CPU
        (60 * GB, 327_680, 200.0, Caps(128, 2048)),  # a model of 70B
        (120 * GB, 12_288, 1.5, Caps(512, 16_384)),  # a small model: not more than is of use
        (0, 12_288, 1e9, Caps(128, 2048)),
        (GB, 0, 0.0, Caps(512, 16_384)),  # no keys in the cache, and a time too short to measure
    ],
)
def test_memory_and_speed_bound_a_batch_and_a_step(
    free_bytes: int, token_bytes: int, token_us: float, caps: Caps
) -> None:
    assert caps_of_gpu(free_bytes, token_bytes, token_us / 1e6) == caps
