"""Counts empty responses by their reason, and logs why, at most every five seconds: none is ever silent."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

LOG_EVERY_SECONDS = 5.0

# The reasons that are the model's own; the others are those of `errors.ModelError`.
SAID_NOTHING = "no_text"
UNUSABLE = "unusable"


class EmptyResponses:
    """Counts empty responses by reason. Used from the event loop only."""

    def __init__(self, on_empty: Callable[[str], None]) -> None:
        """on_empty: called with the reason of each empty response."""
        self._on_empty = on_empty
        self._unlogged: dict[str, int] = {}
        self._logged_at: dict[str, float] = {}

    def count(self, reason: str, message: str) -> None:
        """Counts one more, and logs `message` with their number unless this reason was logged a moment ago."""
        self._on_empty(reason)
        self._unlogged[reason] = self._unlogged.get(reason, 0) + 1
        now = time.monotonic()
        if now - self._logged_at.get(reason, -LOG_EVERY_SECONDS) >= LOG_EVERY_SECONDS:
            self._logged_at[reason] = now
            answers = self._unlogged.pop(reason)
            logger.warning("empty answer: %s", message, extra={"reason": reason, "answers": answers})
