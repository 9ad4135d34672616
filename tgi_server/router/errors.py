"""Errors of requests, each with its HTTP status and TGI error type."""

from collections.abc import Collection
from typing import Any, Self

from shared.logging import one_line

# Characters: a message may repeat what a client sent.
_LONGEST_MESSAGE = 1_000
_OPENAI = ("/v1/", "/v2/")
OLLAMA = "/api/"
_NOT_TGI = (*_OPENAI, OLLAMA)
ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
    **{413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"},
    504: "timeout_error",
}
# Details of a refusal, by the field that is refused, for which clients look before they send a request without it.
_ANTHROPIC_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
_PROMPTS = {
    **{"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"},
    "/v1/decisions": "input",
}


class StartupError(Exception):
    """The router cannot start. `str()` of the error is one line that says why."""


class RouterError(Exception):
    """Base of all errors that a client gets. `str()` of it is the message: one line of bounded length."""

    status = 500
    error_type = "internal"
    # OpenAI's name of the fault, for clients that look for it.
    code: str | None = None

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, _LONGEST_MESSAGE))


class InvalidRequest(RouterError):
    """The request is invalid; it never reached a shard.

    param: the path of the field that is wrong, for OpenAI's clients: `messages[0].content`.
    """

    status = 422
    error_type = "validation"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param or None

    @classmethod
    def at(cls, path: str, fault: str) -> Self:
        """Returns the error of the field at a path."""
        return cls(f"`{path}` {fault}", path)

    def move_below(self, place: str) -> None:
        """Names the field by its path in a larger request, of which it has been a part at `place`."""
        path = f"{place}.{self.param}" if self.param else place
        message = str(self).replace(f"`{self.param}`", f"`{path}`", 1)
        self.args = (message if path in message else f"`{place}`: {self}",)
        self.param = path


class ContextOverflow(InvalidRequest):
    """The prompt, or the prompt with the requested answer, has too many tokens.

    Clients look for the words, and parse the numbers: `str()` has TGI's words; OpenAI's and Anthropic's are beside it.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, openai_message: str, anthropic_message: str) -> None:
        super().__init__(message)
        self.openai_message = openai_message
        self.anthropic_message = anthropic_message

    @classmethod
    def of_prompt(cls, tokens: int, max_input_tokens: int, *, at_least: bool = False) -> Self:
        """Returns the error of a prompt that is too long. at_least: it may have more tokens than that."""
        given = f"at least {tokens}" if at_least else str(tokens)
        return cls(
            f"`inputs` must have less than {max_input_tokens + 1} tokens. Given: {given}",
            f"This model's maximum context length is {max_input_tokens} tokens of input. However, your messages "
            f"resulted in {given} tokens. Please reduce the length of the messages.",
            f"prompt is too long: {tokens} tokens > {max_input_tokens} maximum"
            + (" (further tokens were not counted)" if at_least else ""),
        )

    @classmethod
    def of_total(cls, tokens: int, max_new_tokens: int, max_total_tokens: int) -> Self:
        """Returns the error of a prompt that leaves no room for the requested answer."""
        return cls(
            f"`inputs` tokens + `max_new_tokens` must be <= {max_total_tokens}. "
            f"Given: {tokens} `inputs` tokens and {max_new_tokens} `max_new_tokens`",
            f"This model's maximum context length is {max_total_tokens} tokens. However, you requested "
            f"{tokens + max_new_tokens} tokens ({tokens} in the messages, {max_new_tokens} in the completion). "
            "Please reduce the length of the messages or completion.",
            f"input length and `max_tokens` exceed context limit: {tokens} + {max_new_tokens} > {max_total_tokens}",
        )


class PreviousResponseNotFound(InvalidRequest):
    """The response that another one should continue is not stored, or no longer."""

    status = 400
    code = "previous_response_not_found"


class NoSuchItem(InvalidRequest):
    """An item that an input refers to is not stored, or no longer."""

    status = 400
    code = "item_not_found"

    def __init__(self, item_id: str) -> None:
        super().__init__(
            f"there is no item {item_id[:100]!r} here: it was never stored, or was evicted; send the item itself",
            param="input",
        )


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


class RequestTimedOut(RouterError):
    """The time that the caller gave the request is up."""

    status = 504
    error_type = "timeout"
    code = "deadline_exceeded"


class CannotBeInTime(RouterError):
    """The request would surely be answered after its deadline. retry_after: seconds until others are done."""

    status = 503
    error_type = "overloaded"
    code = "deadline_unreachable"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelNotReady(RouterError):
    """One of several models could not be loaded, or its shards have ended.

    retry_after: seconds until it is tried again.
    """

    status = 503
    error_type = "model_unavailable"
    code = "model_unavailable"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class GenerationFailed(RouterError):
    """The shards failed while generating."""

    status = 424
    error_type = "generation"


class DecodingFailed(RouterError):
    """The process that decodes images died, or has no processor for the model."""


class GrammarFailed(RouterError):
    """The grammar could not be followed to the end of the text: it became too complex, or no token fits."""

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


class CannotSleep(RouterError):
    """The model cannot sleep, for the reason that its shards give."""

    status = 409
    error_type = "cannot_sleep"


class PayloadTooLarge(RouterError):
    """The body has more bytes than `payload_limit`."""

    status = 413
    error_type = "payload_too_large"


class Unauthorized(RouterError):
    """The server needs an API key, and the request has none or a wrong one."""

    status = 401
    error_type = "unauthorized"
    code = "invalid_api_key"


class Forbidden(RouterError):
    """A browser sends the request for a page that may not call the server."""

    status = 403
    error_type = "forbidden"


class UnsupportedMediaType(RouterError):
    """The request's headers declare a body that is not JSON."""

    status = 415
    error_type = "unsupported_media_type"


class Superseded(RouterError):
    """The request was served in the background, and another one continues or replaces its answer.

    Its client gets a response with what was done.
    """


class ClientGone(RouterError):
    """The client closed its connection before the response."""

    status = 499
    error_type = "cancelled"


class SlowReader(ClientGone):
    """The client takes its response so slowly that too much of it waits."""


class NoSuchRoute(RouterError):
    """The server has no such path, or not with this method.

    allowed: the methods that the path has.
    """

    error_type = "not_found"

    def __init__(self, message: str, status: int = 404, allowed: Collection[str] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.allowed = allowed


class NoSuchModel(RouterError):
    """The server has another model."""

    status = 404
    error_type = "not_found"
    code = "model_not_found"


class NoSuchAdapter(RouterError):
    """The server has no adapter of that id."""

    status = 404
    error_type = "not_found"
    code = "model_not_found"

    def __init__(self, adapter_id: str, known: Collection[str]) -> None:
        there = f"it has {', '.join(map(repr, known))}" if known else "it has none"
        super().__init__(f"there is no adapter {adapter_id[:100]!r} on this server; {there}")


class NoSuchResponse(RouterError):
    """The response is not stored, or no longer."""

    status = 404
    error_type = "not_found"
    code = "response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(f"there is no response {response_id[:100]!r} here: it was never stored, or was evicted")


class NoSuchRequest(RouterError):
    """A request that is to be explained is not remembered."""

    status = 404
    error_type = "not_found"
    code = "request_not_found"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"nothing is remembered of a request {request_id[:100]!r} with this API key and `cache_salt`: it has not "
            "ended, or many others came since; the header `x-request-id` of a response has the id"
        )


class NotSupported(RouterError):
    """A feature of OpenAI's, Anthropic's or Ollama's API that this server does not have."""

    # Not 501, which clients and proxies take for a failure, and send the request again.
    status = 404
    error_type = "not_supported"
    code = "not_supported"


def shown_status(error: RouterError, path: str) -> int:
    """Returns the HTTP status of an error. Below /v1/, /v2/ and /api/ a request that breaks a rule gets 400, where
    TGI has 422.
    """
    return 400 if error.status == 422 and path.startswith(_NOT_TGI) else error.status


def shown_message(error: RouterError, path: str) -> str:
    """Returns the message for the client and the log, in the words of TGI, OpenAI or Anthropic."""
    if not isinstance(error, ContextOverflow) or not path.startswith(_NOT_TGI):
        return str(error)
    return error.anthropic_message if path.startswith(ANTHROPIC) else error.openai_message


def error_body(error: RouterError, path: str) -> dict[str, Any]:
    """Returns the JSON object of an error: TGI's, OpenAI's below /v1/ and /v2/, Anthropic's below /v1/messages, or
    Ollama's below /api/.
    """
    if path.startswith(OLLAMA):
        return {"error": shown_message(error, path)}
    if path.startswith(ANTHROPIC):
        kind = _ANTHROPIC_TYPES.get(shown_status(error, path), "api_error")
        details = _ANTHROPIC_DETAILS.get(error.param or "") if isinstance(error, InvalidRequest) else None
        shown = {"type": kind, "message": shown_message(error, path)} | (
            {} if details is None else {"details": details}
        )
        return {"type": "error", "error": shown}
    if not path.startswith(_OPENAI):
        prefix = "Input validation error: " if error.error_type == "validation" else ""
        return {"error": f"{prefix}{error}", "error_type": error.error_type}
    param = error.param if isinstance(error, InvalidRequest) else None
    if isinstance(error, ContextOverflow):
        param = _PROMPTS.get(path)
    kind = "invalid_request_error" if shown_status(error, path) in (400, 404) else error.error_type
    return {
        "error": {"message": shown_message(error, path), "type": kind, "param": param, "code": error.code},
        "error_type": error.error_type,
    }
