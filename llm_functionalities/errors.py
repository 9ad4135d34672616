"""The errors of this service: errors of the model become empty responses, errors of the caller gRPC statuses."""

from typing import ClassVar

import grpc


class ModelError(Exception):
    """The model gave no answer. `Model` turns the error into an empty response with `reason`."""

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


class NoThread(ModelError):
    """The system lets the service start no thread that could ask the model."""

    reason = "no_thread"


class EndpointDown(ModelError):
    """The endpoint did not receive the request, so another endpoint may have it."""

    reason = "down"


class Unresolvable(EndpointDown):
    """The endpoint's host name has no address that could be found in time."""

    reason = "unresolvable"


class Unreachable(EndpointDown):
    """The service could not connect to the endpoint in time."""

    reason = "unreachable"


class Unread(Unreachable):
    """The endpoint closed the connection before it had read the request, as servers do that stop."""


class CircuitOpen(EndpointDown):
    """The endpoint failed a moment ago and has not been seen healthy since."""

    reason = "circuit_open"


class EndpointFailed(ModelError):
    """The endpoint took the request and gave no answer. The request is never sent again."""

    reason = "failed"


class ConnectionLost(EndpointFailed):
    """The connection broke before the response was whole."""

    reason = "connection_lost"


class EndpointRefused(EndpointFailed):
    """The endpoint refused the request before it generated anything, so another endpoint may have it."""


class EndpointOverloaded(EndpointRefused):
    """The endpoint responded with 429."""

    reason = "overloaded"


class NoTimeLeft(EndpointRefused):
    """The endpoint has so much to do that the request would be answered after its deadline."""

    reason = "overloaded"


class Unavailable(EndpointRefused):
    """The endpoint responded with 503."""

    reason = "server_error"


class WrongToken(EndpointRefused):
    """The endpoint responded with 401 or 403: the token is missing, or is not the endpoint's."""

    reason = "unauthorized"


class NotFound(EndpointRefused):
    """The endpoint responded with 404 or 405: it is not a text-generation server, or its URL has the wrong path."""

    reason = "not_found"


class ServerFailed(EndpointFailed):
    """The endpoint responded with another status of a failure, or reported a failed generation."""

    reason = "server_error"


class BadResponse(EndpointFailed):
    """The endpoint's response is not one of the text-generation API."""

    reason = "bad_answer"


class ResponseTooLarge(BadResponse):
    """The response is longer than this service reads, which the request may have asked for."""


class Rejected(ModelError):
    """The endpoint refused this request with a 4xx status, or it cannot be sent. It is at fault, not the endpoint."""

    reason = "rejected"


class NotServed(Rejected):
    """The endpoint has no such route, or no model for it. It may serve other requests."""

    reason = "not_supported"


class CallRefused(Exception):
    """A call that this service refuses. Its caller sees `status` and the message."""

    status: ClassVar[grpc.StatusCode]


class InvalidArgument(CallRefused):
    """The request contradicts the service's contract, such as a message of another type than the method's."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class UnusableGrammar(InvalidArgument):
    """The request has a grammar that no answer could follow."""


class TooBusy(CallRefused):
    """The service already works on as many calls as it may."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class ServiceFailed(CallRefused):
    """An internal error; the log has the reason."""

    status = grpc.StatusCode.INTERNAL


class CallerGone(CallRefused):
    """The caller has closed its connection or cancelled the call."""

    status = grpc.StatusCode.CANCELLED


class TooSlow(CallRefused):
    """The caller does not send its request, or does not read the response, in time."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class CannotStart(Exception):
    """The service cannot start; the message says what to do."""
