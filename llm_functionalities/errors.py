"""The errors of this service: ModelErrors become empty responses, errors of the caller become gRPC statuses."""

from typing import ClassVar

import grpc


class ModelError(Exception):
    """There is no answer of the model. `Model` turns the error into an empty response with `reason`."""

    reason: ClassVar[str] = "error"


class NoEndpoint(ModelError):
    """No endpoint is configured."""

    reason = "no_endpoint"


class DeadlineExceeded(ModelError):
    """The call's time is up."""

    reason = "deadline"


class Cancelled(ModelError):
    """The caller is gone, or the service stops."""

    reason = "cancelled"


class NoThread(ModelError):
    """The system does not allow another thread for the request."""

    reason = "no_thread"


class EndpointDown(ModelError):
    """The endpoint did not receive the request, so it may be sent to another one."""

    reason = "down"


class Unresolvable(EndpointDown):
    """The endpoint's host name has no address that could be found in time."""

    reason = "unresolvable"


class Unreachable(EndpointDown):
    """The service could not connect to the endpoint in time."""

    reason = "unreachable"


class Unread(Unreachable):
    """The endpoint closed the connection before it had read the request, as servers do when they stop."""


class CircuitOpen(EndpointDown):
    """The endpoint failed recently, and no health check has succeeded since."""

    reason = "circuit_open"


class EndpointFailed(ModelError):
    """The endpoint received the request and did not answer it. The request is not sent again."""

    reason = "failed"


class ConnectionLost(EndpointFailed):
    """The connection was lost before the response was complete."""

    reason = "connection_lost"


class EndpointRefused(EndpointFailed):
    """The endpoint refused the request without generating anything, so it may be sent to another one."""


class EndpointOverloaded(EndpointRefused):
    """The endpoint responded with 429."""

    reason = "overloaded"


class NoTimeLeft(EndpointRefused):
    """The endpoint is too busy to answer the request before its deadline."""

    reason = "overloaded"


class Unavailable(EndpointRefused):
    """The endpoint responded with 503."""

    reason = "server_error"


class WrongToken(EndpointRefused):
    """The endpoint responded with 401, 403 or 407: the token is missing or wrong."""

    reason = "unauthorized"


class NotFound(EndpointRefused):
    """The endpoint responded with 404 or 405: it is not a text-generation server, or its URL has the wrong path."""

    reason = "not_found"


class ServerFailed(EndpointFailed):
    """The endpoint responded with another error status, or reported a failed generation."""

    reason = "server_error"


class BadResponse(EndpointFailed):
    """The endpoint's response does not conform to the text-generation API."""

    reason = "bad_answer"


class ResponseTooLarge(BadResponse):
    """The response is longer than the limit. The request may be the cause, not the endpoint."""


class Rejected(ModelError):
    """The endpoint refused this request with a 4xx status, or it cannot be sent. The request is at fault."""

    reason = "rejected"


class NotServed(Rejected):
    """The endpoint has no such route, or no model for it. It may serve other requests."""

    reason = "not_supported"


class CallRefused(Exception):
    """A call that this service refuses. Its caller gets `status` and the message."""

    status: ClassVar[grpc.StatusCode]


class InvalidArgument(CallRefused):
    """The request violates the service's contract, for example by a message of the wrong type."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class UnusableGrammar(InvalidArgument):
    """The request has a grammar that no answer could follow."""


class TooBusy(CallRefused):
    """The service has its maximum number of calls in progress."""

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
