"""A point on the wall clock by which a call has its answer."""

import time
from dataclasses import dataclass

CALLER_MARGIN_SECONDS = 0.05
"""How long before the caller's own gRPC deadline the answer leaves here, so that it still arrives."""

CALLER_MARGIN_SHARE = 0.2
"""The margin's largest share of a short gRPC deadline."""


@dataclass(frozen=True)
class Deadline:
    at: float
    """On the clock of `time.monotonic()`, in seconds."""

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        return cls(time.monotonic() + seconds)

    @classmethod
    def of_request(
        cls, timeout_ms: int, caller_seconds: float | None, default_seconds: float, longest_seconds: float
    ) -> "Deadline":
        """Returns the sooner of the request's `timeout_ms` and the caller's gRPC deadline; the default without them.

        `caller_seconds` is what is left of the caller's gRPC deadline; the answer has to leave a little before it.
        Nobody gets more than `longest_seconds`.
        """
        limits = []
        if timeout_ms > 0:
            limits.append(timeout_ms / 1000)
        if caller_seconds is not None:
            margin = min(CALLER_MARGIN_SECONDS, CALLER_MARGIN_SHARE * caller_seconds)
            limits.append(max(0.0, caller_seconds - margin))
        return cls.after(min(longest_seconds, *limits) if limits else default_seconds)

    def remaining(self) -> float:
        """Seconds that are left; zero or less once it has passed."""
        return self.at - time.monotonic()

    def within(self, seconds: float) -> "Deadline":
        """The sooner of this deadline and one `seconds` from now."""
        return Deadline(min(self.at, time.monotonic() + seconds))
