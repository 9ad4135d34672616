"""Watches an event loop for lag."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS = 0.1
_WARNING_SECONDS = 0.25
_SECONDS_BETWEEN_WARNINGS = 10.0


async def watch_event_loop(observe: Callable[[float], None]) -> None:
    """Measures the running loop's lag ten times a second, until it is cancelled.

    The lag, in seconds, is how much later than asked the loop wakes this task; it serves no other task meanwhile. Each
    lag is given to `observe`. A long one is logged, at most once in ten seconds.
    """
    loop = asyncio.get_running_loop()
    quiet_until = loop.time()
    while True:
        due = loop.time() + _INTERVAL_SECONDS
        await asyncio.sleep(_INTERVAL_SECONDS)
        now = loop.time()
        lag = max(now - due, 0.0)
        observe(lag)
        if lag > _WARNING_SECONDS and now >= quiet_until:
            logger.warning("the event loop was blocked for %.2f s", lag)
            quiet_until = now + _SECONDS_BETWEEN_WARNINGS
