"""Threads of passes in which kernels alternate with operators of torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Tokens of a pass, and tokens whose keys it reads, up to which it pays that torch's operators have one thread.
FEW_TOKENS, FEW_KEYS = 64, 4096


@contextmanager
def kernel_threads() -> Iterator[None]:
    """Gives the engine's kernels all threads, in their own pool, and torch's operators one.

    OpenMP's threads meet at the end of every loop. Where other programs use the cores, each meeting waits for a thread
    that is not scheduled, and the others spin meanwhile. A pass of few tokens has hundreds of such loops, most of them
    too short for several threads.
    """
    threads = torch.get_num_threads()
    before = torch.ops.oatmill.set_own_threads(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.ops.oatmill.set_own_threads(before)
