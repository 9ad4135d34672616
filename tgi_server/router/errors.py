"""Errors of requests, each with its HTTP status and TGI error type."""

from shared.logging import one_line

# Characters: a message may repeat what a client sent.
_LONGEST_MESSAGE = 1_000


class StartupError(Exception):
    """The router cannot start. `str()` of the error is one line that says why."""


class RouterError(Exception):
    """Base of all errors that a client is told about. `str()` of it is the message: one line of bounded length."""

    status = 500
    error_type = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, _LONGEST_MESSAGE))


class InvalidRequest(RouterError):
    """The request breaks a rule; it never reached a shard."""

    status = 422
    error_type = "validation"


class InvalidTemplate(InvalidRequest):
    """The chat template is missing, or refuses the messages."""

    error_type = "template_error"


class InvalidTool(InvalidRequest):
    """The tools, or the choice among them, cannot be served."""

    error_type = "tool_error"


class Overloaded(RouterError):
    """More requests are in flight than `max_concurrent_requests`."""

    status = 429
    error_type = "overloaded"


class GenerationFailed(RouterError):
    """The shards failed while generating."""

    status = 424
    error_type = "generation"


class GrammarFailed(RouterError):
    """The grammar could not be followed to the end of the text: it got too complex, or no token of the model fits."""

    status = 422
    error_type = "validation"


class IncompleteGeneration(RouterError):
    """The stream ended before the last token."""

    status = 500
    error_type = "incomplete_generation"


class Unhealthy(RouterError):
    """The shards do not respond."""

    status = 503
    error_type = "healthcheck"


class PayloadTooLarge(RouterError):
    """The body has more bytes than `payload_limit`."""

    status = 413
    error_type = "payload_too_large"


class Unauthorized(RouterError):
    """The server wants an API key, and the request has none or another."""

    status = 401
    error_type = "unauthorized"


class Forbidden(RouterError):
    """A browser asks on behalf of a page that may not call the server."""

    status = 403
    error_type = "forbidden"


class UnsupportedMediaType(RouterError):
    """The request's headers declare a body that is not JSON."""

    status = 415
    error_type = "unsupported_media_type"


class ClientGone(RouterError):
    """The client closed its connection; nobody reads the response any more."""

    status = 499
    error_type = "cancelled"


class SlowReader(ClientGone):
    """The client takes its response so slowly that too much of it waits."""


class NoSuchRoute(RouterError):
    """The server has no such path, not with this method, or no such model."""

    error_type = "not_found"

    def __init__(self, message: str, status: int = 404) -> None:
        super().__init__(message)
        self.status = status
