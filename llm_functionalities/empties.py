"""Empty answers are never silent: each is counted, and the log says why, though not once for each of them."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

LOG_EVERY_SECONDS = 5.0


class EmptyAnswers:
    """Counts empty answers by reason. Used from the event loop only."""

    def __init__(self, on_empty: Callable[[str], None] = lambda reason: None) -> None:
        self._on_empty = on_empty
        self._unlogged: dict[str, int] = {}
        self._logged_at: dict[str, float] = {}

    def count(self, reason: str, message: str) -> None:
        """One more answer is empty, for `reason`. `message` is in the next log line of this reason."""
        self._on_empty(reason)
        self._unlogged[reason] = self._unlogged.get(reason, 0) + 1
        now = time.monotonic()
        if now - self._logged_at.get(reason, -LOG_EVERY_SECONDS) >= LOG_EVERY_SECONDS:
            self._logged_at[reason] = now
            answers = self._unlogged.pop(reason)
            logger.warning("empty answer: %s", message, extra={"reason": reason, "answers": answers})
