"""The time that a caller gives its request, as clients and proxies write it into headers."""

from dataclasses import dataclass
from math import inf, isfinite

from starlette.datastructures import Headers

# Sent by the clients of OpenAI and Anthropic, in seconds, and by Envoy, in milliseconds.
_READ_TIMEOUT, _ENVOY_TIMEOUT = "x-stainless-read-timeout", "x-envoy-expected-rq-timeout-ms"


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds for the whole answer, and seconds that may pass without a byte of it."""

    whole: float = inf
    silence: float = inf

    @classmethod
    def of(cls, headers: Headers) -> "TimeLimits":
        """Returns the limits in the headers of a request. A value that is not a positive number sets no limit."""
        return cls(_positive(headers.get(_ENVOY_TIMEOUT)) / 1000, _positive(headers.get(_READ_TIMEOUT)))

    def deadlines(self, arrived: float, timeout_ms: int, *, streams: bool) -> tuple[float, float]:
        """Returns the times by which the answer and its first token have to be there.

        timeout_ms: the limit in the request's body; 0: none. streams: a stream breaks its silence with its first token.
        """
        whole = min(self.whole, timeout_ms / 1000 if timeout_ms else inf)
        return arrived + (whole if streams else min(whole, self.silence)), arrived + self.silence


def _positive(value: str | None) -> float:
    try:
        number = float(value or "")
    except ValueError:
        return inf
    return number if isfinite(number) and number > 0 else inf
