"""Counts empty responses by their reason, and logs the reasons at a limited rate."""

import logging
import time
from collections.abc import Callable

from llm_functionalities.errors import Rejected

logger = logging.getLogger(__name__)

LOG_EVERY_SECONDS = 5.0

# The most lines with different messages that are logged for one reason in LOG_EVERY_SECONDS.
MOST_MESSAGES = 10

# Reasons why an answer that the model gave counts as empty. The reasons of failures are in `errors.ModelError`.
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
        """Counts one empty response, and logs `message` with the number of responses since the reason's last line.

        Logs a reason at most once in LOG_EVERY_SECONDS. For requests that a server rejects, this holds for each
        message. request_id: the id of the request of this response.
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
