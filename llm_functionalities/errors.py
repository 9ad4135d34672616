"""What can go wrong between this service and a model. Each kind has a `reason`, its label in metrics and logs."""

from typing import ClassVar

import grpc


class ModelError(Exception):
    """No answer came from the model. Turned into an empty answer in one place, `Model`."""

    reason: ClassVar[str] = "error"


class NoEndpoint(ModelError):
    """No endpoint is configured."""

    reason = "no_endpoint"


class DeadlineExceeded(ModelError):
    """The call's time is up."""

    reason = "deadline"


class Cancelled(ModelError):
    """The caller went away, or the service stops."""

    reason = "cancelled"


class EndpointDown(ModelError):
    """Nothing was sent: the endpoint could not be reached. Another endpoint may be tried."""

    reason = "down"


class Unresolvable(EndpointDown):
    """The endpoint's host name has no address that could be found in time."""

    reason = "unresolvable"


class Unreachable(EndpointDown):
    """No connection to the endpoint could be made in time."""

    reason = "unreachable"


class CircuitOpen(EndpointDown):
    """The endpoint failed a moment ago and has not been seen healthy since."""

    reason = "circuit_open"


class EndpointFailed(ModelError):
    """The endpoint took the request and did not answer it. It is never sent again."""

    reason = "failed"


class ConnectionLost(EndpointFailed):
    """The connection broke before the answer was whole."""

    reason = "connection_lost"


class Overloaded(EndpointFailed):
    """The endpoint answered 429."""

    reason = "overloaded"


class ServerFailed(EndpointFailed):
    """The endpoint answered with a 5xx status, or reported a failed generation."""

    reason = "server_error"


class BadAnswer(EndpointFailed):
    """The endpoint's answer is not one of the text-generation API."""

    reason = "bad_answer"


class Rejected(ModelError):
    """The endpoint refused this request (4xx): the request's fault, not the endpoint's."""

    reason = "rejected"


class Refused(Exception):
    """A call that gets no answer. Its caller sees `status` and the message."""

    status: ClassVar[grpc.StatusCode]


class InvalidRequest(Refused):
    """The caller's mistake."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class InvalidGrammar(InvalidRequest):
    """A request's grammar that no answer could follow."""


class TooBusy(Refused):
    """As many calls run as may."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class TooSlow(Refused):
    """The caller does not send its message, or does not read the answer."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class StartupError(Exception):
    """The service cannot start; the message says what to do."""
