"""The turns of a load's workers: a number of them, or as many as the time allows. Each decides by chance of its own."""

import random
import time
from collections.abc import Iterator

# What a worker does in its turn is decided by this.
Turn = random.Random


def turns(count: int, seed: int) -> Iterator[Turn]:
    """Yields so many. Those of one seed are the same each time, whichever workers take them."""
    for number in range(count):
        yield Turn(f"{seed} {number}")


def turns_until(over: float) -> Iterator[Turn]:
    """Yields turns until that time of the monotonic clock."""
    while time.monotonic() < over:
        yield Turn()
