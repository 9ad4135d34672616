"""Counts empty responses by their reason, and logs why: none is ever silent, and few lines say it."""

import logging
import time
from collections.abc import Callable

from llm_functionalities.errors import Rejected

logger = logging.getLogger(__name__)

LOG_EVERY_SECONDS = 5.0

# Of one reason and different messages, such as what a server says of different requests, within that time.
MOST_MESSAGES = 10

# The reasons that are the model's own; the others are in `errors.ModelError`.
SAID_NOTHING = "no_text"
UNUSABLE = "unusable"


class EmptyResponses:
    """Counts empty responses by reason. Used from the event loop only."""

    def __init__(self, on_empty: Callable[[str], None]) -> None:
        """on_empty: called with the reason of each empty response."""
        self._on_empty = on_empty
        self._unlogged: dict[str, int] = {}
        self._logged: dict[str, dict[str, float]] = {}

    def count(self, reason: str, message: str, request_id: str = "") -> None:
        """Counts one more, and logs `message` with the number since the reason's last line.

        Unless it was logged a moment ago: the reason, or of requests that a server rejects the message. request_id: of
        the last of them.
        """
        self._on_empty(reason)
        self._unlogged[reason] = self._unlogged.get(reason, 0) + 1
        now = time.monotonic()
        logged = {each: at for each, at in self._logged.get(reason, {}).items() if now - at < LOG_EVERY_SECONDS}
        self._logged[reason] = logged
        by_message = reason == Rejected.reason and len(logged) < MOST_MESSAGES
        if message not in logged if by_message else not logged:
            logged[message] = now
            extra = {"reason": reason, "answers": self._unlogged.pop(reason)}
            if request_id:
                extra["request_id"] = request_id
            logger.warning("empty answer: %s", message, extra=extra)
