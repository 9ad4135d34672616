"""Whether a model server takes grammars: not every one that speaks the text-generation API does."""

import logging
import threading
import time

logger = logging.getLogger(__name__)

# Oatmill's server says so of a grammar that is too complex, and when it has too many to compile. It may take others.
_ONE_GRAMMAR = (
    "the grammar cannot be used",
    "the grammar could not be followed",
    "the grammar cannot be compiled now",
)

TRY_AGAIN_SECONDS = 300.0
"""Another server, which does, may have come in its place."""


class GrammarSupport:
    """What is known of one endpoint. Used from many threads; the log has one line when grammars are first refused."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._try_at = 0.0
        self._told = False

    def worth_a_try(self) -> bool:
        return time.monotonic() >= self._try_at

    def refused(self, reason: Exception) -> None:
        """A request was refused with a grammar, and answered without."""
        if concerns_one_grammar(str(reason)):
            return
        self._try_at = time.monotonic() + TRY_AGAIN_SECONDS
        with self._lock:
            told, self._told = self._told, True
        if not told:
            logger.warning("endpoint %s takes no grammars, answers are only parsed: %s", self._endpoint, reason)

    def taken(self) -> None:
        self._told = False


def concerns_one_grammar(message: str) -> bool:
    """Returns True if a server's message says nothing of the grammars of other requests."""
    return any(words in message for words in _ONE_GRAMMAR)
