"""One text-generation server: its requests, its health, and its number of requests in progress.

The connection is lazy: it is opened by the first request. A closed one is reconnected by the next request; while the
circuit breaker is open, health checks find out when reconnecting works.
"""

import logging
import re
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import quote

import httpx2
from huggingface_hub import InferenceClient
from huggingface_hub.errors import (
    GenerationError,
    HfHubHTTPError,
    IncompleteGenerationError,
    OverloadedError,
    TextGenerationError,
    ValidationError,
)

from llm_functionalities.endpoint.address import Address
from llm_functionalities.endpoint.breaker import CircuitBreaker
from llm_functionalities.endpoint.call import Call, Deadline, working_on
from llm_functionalities.endpoint.generation import GeneratedText, GenerationParameters
from llm_functionalities.errors import (
    BadResponse,
    DeadlineExceeded,
    EndpointDown,
    EndpointFailed,
    EndpointOverloaded,
    ModelError,
    NotFound,
    NoTimeLeft,
    NotServed,
    Rejected,
    ResponseTooLarge,
    ServerFailed,
    Unavailable,
    WrongToken,
)

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
_ERROR_OF_STATUS: Mapping[int, type[ModelError]] = {
    **dict.fromkeys(range(400, 500), Rejected),
    **dict.fromkeys((401, 403, 407), WrongToken),
    **dict.fromkeys((404, 405), NotFound),
    # The server had no time to read the request; it failed to generate, in the words of TGI.
    **dict.fromkeys((408, 424), ServerFailed),
    429: EndpointOverloaded,
    503: Unavailable,
}
# Statuses of routes that not every server has: they say nothing about other routes.
_NO_ROUTE = frozenset({404, 405, 501})
UNHEALTHY = frozenset({429, 500, 502, 503, 504})
LONGEST_MESSAGE = 300

# Envoy's header: the milliseconds after which the response is useless.
_TIME_LEFT = "x-envoy-expected-rq-timeout-ms"

# Codes of Oatmill's server for a deadline that has passed, or is too short.
_ERROR_CODE = "x-error-code"
_ERROR_OF_CODE: Mapping[str, type[ModelError]] = {
    "deadline_exceeded": DeadlineExceeded,
    "deadline_unreachable": NoTimeLeft,
}
# Events of a stream have no code: a failure within these seconds of the deadline counts as caused by it.
_ABOUT_NOW_SECONDS = 0.05
# Maximum number of events of a stream in addition to one for each token.
MORE_EVENTS = 16

_SURROGATE = re.compile("[\ud800-\udfff]")

# Seconds after which a feature that a server lacked is tried again.
TRY_AGAIN_SECONDS = 300.0

# Messages of Oatmill's server about a single grammar, or about too many at once. Other grammars may work.
_ONE_GRAMMAR = (
    "the grammar cannot be used",
    "the grammar could not be followed",
    "the grammar cannot be compiled now",
)


class Endpoint:
    """Sends requests to one text-generation server. Its methods block, no longer than their `call` lasts."""

    def __init__(
        self, address: Address, http: httpx2.Client, token: str | None = None, *, model: str = "", **breaker: Any
    ) -> None:
        """model: name of the model of a server with several; empty: the server's default."""
        self._url = str(address)
        self._query = f"?model={quote(model, safe='')}" if model else ""
        self.name = f"{self._url}#{model}" if model else self._url
        self.breaker = CircuitBreaker(f"endpoint {self.name}", self._probe, **breaker)
        self._http = http
        self._token = token
        self._grammars = OptionalFeature()
        self._lock = threading.Lock()
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def is_avoided(self) -> bool:
        """True while requests should go to other endpoints, because this one failed and has not answered since."""
        return self.breaker.ejected or (self.breaker.on_probation and self._in_flight > 0)

    def generate(self, prompt: str, generation: GenerationParameters, call: Call) -> GeneratedText:
        """Returns the model's answer, without the prompt. Raises ModelError.

        An optional grammar is left out if the server supports none. A server generates nothing for a request that it
        refuses, so the prompt may be sent again.
        """
        if not (generation.grammar_is_optional and generation.grammar):
            return self._generate(prompt, generation, call)
        if self._grammars.worth_a_try():
            try:
                answer = self._generate(prompt, generation, call)
            except Rejected as error:
                call.allow_another()
                answer = self._generate(prompt, generation.without_grammar(), call)
                if not _concerns_one_grammar(str(error)) and self._grammars.missing():
                    logger.warning(
                        "endpoint %s does not support grammars; requests are sent without: %s", self.name, error
                    )
            else:
                self._grammars.found()
            return answer
        return self._generate(prompt, generation.without_grammar(), call)

    def _generate(self, prompt: str, generation: GenerationParameters, call: Call) -> GeneratedText:
        with self._serving(call):
            answer = self._client(call, "/generate").text_generation(prompt, **generation.parameters())
            # The `details` of a response have the same, but the server would have to compute all logprobs for them.
            headers = call.response_headers or {}
            generated = _count(headers.get("x-generated-tokens"))
            reason = headers.get("x-finish-reason", "")
            if not reason and generated:
                reason = "length" if generated >= generation.max_tokens else "eos_token"
            return GeneratedText(_text(answer), _text(reason), _count(headers.get("x-prompt-tokens")), generated)

    def stream(self, prompt: str, generation: GenerationParameters, call: Call) -> Generator[GeneratedText, None, None]:
        """Yields the answer in pieces as they arrive. Closing the iterator stops the generation. Raises ModelError."""
        with self._serving(call), self._client(call, "/generate_stream") as client:
            whole = False
            most = generation.max_tokens + MORE_EVENTS
            outputs = client.text_generation(prompt, stream=True, details=True, **generation.parameters())
            for place, output in enumerate(outputs):
                if place == most:
                    raise BadResponse(f"the stream has more than {most} events for {generation.max_tokens} tokens")
                whole = output.generated_text is not None
                text = "" if output.token.special else _text(output.token.text)
                if (end := output.details) is not None:
                    reason = _text(end.finish_reason or "")
                    yield GeneratedText(text, reason, _count(end.input_length), _count(end.generated_tokens))
                elif text:
                    yield GeneratedText(text)
            if not whole:
                raise ServerFailed("the stream ended before the answer did")

    def post(self, route: str, body: str, call: Call, *, counted: bool = True) -> GeneratedText:
        """Posts a JSON body, and returns the response unchanged. Raises ModelError, such as NotServed.

        counted: True if the request counts as load.
        """
        with self._serving(call, counted=counted):
            headers = {name: value for name, value in self._headers(call).items() if value is not None}
            headers["content-type"] = "application/json"
            response = self._http.post(f"{self._url}{route}{self._query}", content=body.encode(), headers=headers)
            if response.status_code in _NO_ROUTE:
                raise NotServed(_short(f"{response.status_code}: {response.text}"))
            if response.status_code != 200:
                raise _of_status(response.status_code, response.text, call)
            return GeneratedText(response.text)

    def _headers(self, call: Call) -> dict[str, str | None]:
        # The header is always set, because otherwise the client would send the machine's Hugging Face token.
        bearer = f"Bearer {self._token}" if self._token else None
        left = {_TIME_LEFT: str(max(1, int(1000 * call.remaining())))}
        return {**call.headers, **left, "authorization": bearer}

    def _client(self, call: Call, path: str) -> InferenceClient:
        headers = cast(dict[str, str], self._headers(call))
        return InferenceClient(model=self._url + path + self._query, token=self._token, headers=headers)

    def _probe(self) -> None:
        call = Call(Deadline.after(PROBE_SECONDS))
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        with working_on(call), _model_errors(call):
            status = self._http.get(f"{self._url}/health", headers=headers).status_code
            if status in UNHEALTHY:
                raise ServerFailed(f"/health responded with {status}")

    @contextmanager
    def _serving(self, call: Call, *, counted: bool = True) -> Iterator[None]:
        if not call.insists:
            self.breaker.check()
        with self._lock:
            self._in_flight += counted
        try:
            with working_on(call), _model_errors(call):
                yield
            self.breaker.succeeded()
        except EndpointDown as error:
            self.breaker.unreachable(error)
            raise
        except NoTimeLeft:  # requests with more time are answered
            self.breaker.succeeded()
            raise
        except ResponseTooLarge:  # says nothing about the endpoint's health
            raise
        except EndpointFailed as error:
            self.breaker.failed(error)
            raise
        except DeadlineExceeded:
            self.breaker.suspect()
            raise
        except Rejected:
            self.breaker.succeeded()
            raise
        finally:
            with self._lock:
                self._in_flight -= counted


class OptionalFeature:
    """Remembers for TRY_AGAIN_SECONDS that a server lacks a feature. Later it may have been upgraded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._try_at = 0.0
        self._is_missing = False

    def worth_a_try(self) -> bool:
        return time.monotonic() >= self._try_at

    def missing(self) -> bool:
        """Records that the server lacks the feature. Returns True if that was not known. Thread-safe."""
        with self._lock:
            known, self._is_missing = self._is_missing, True
            self._try_at = time.monotonic() + TRY_AGAIN_SECONDS
        return not known

    def found(self) -> None:
        self._is_missing = False


def _concerns_one_grammar(message: str) -> bool:
    """Returns True if a server's message concerns only the grammar of one request."""
    return any(words in message for words in _ONE_GRAMMAR)


def _text(answer: Any) -> str:
    """Replaces lone surrogates by U+FFFD: JSON may have them, gRPC messages may not.

    Raises BadResponse if `answer` is not a str.
    """
    if not isinstance(answer, str):
        raise BadResponse(f"the answer is a {type(answer).__name__}, not a text")
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", answer)


def _count(value: Any) -> int:
    """Parses a number of tokens in a server's response; 0 if it is not a number."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


@contextmanager
def _model_errors(call: Call) -> Iterator[None]:
    """Turns all exceptions of the HTTP client into ModelErrors."""
    try:
        yield
    except ModelError:
        raise
    except HfHubHTTPError as error:
        raise _of_status(error.response.status_code, error.server_message or str(error), call) from None
    except TextGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            raise _of_status(cause.response.status_code, str(error), call) from None
        raise _of_report(error, call) from None
    except Exception as error:
        message = _short(f"{type(error).__name__}: {error}")
        if not call.sent:
            raise Rejected(f"the request cannot be written as JSON: {message}") from None
        # The client parses the response as it arrives, and a malformed one may raise any exception.
        raise BadResponse(message) from None


def _of_status(status: int, message: str, call: Call) -> ModelError:
    text = _short(f"{status}: {message}")
    code = (call.response_headers or {}).get(_ERROR_CODE, "")
    if code in _ERROR_OF_CODE:
        return _ERROR_OF_CODE[code](text)
    error = Rejected if _concerns_one_grammar(text) else _ERROR_OF_STATUS.get(status, ServerFailed)
    return error(text)


def _of_report(error: TextGenerationError, call: Call) -> ModelError:
    """Converts an error that a stream reported as an event."""
    if isinstance(error, OverloadedError):
        return EndpointOverloaded(_short(str(error)))
    if isinstance(error, ValidationError):
        return Rejected(_short(str(error)))
    if call.deadline.remaining() < _ABOUT_NOW_SECONDS:
        return DeadlineExceeded(_short(str(error)))
    kind = "" if isinstance(error, GenerationError | IncompleteGenerationError) else f"{type(error).__name__}: "
    return ServerFailed(_short(f"{kind}{error}"))


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}..."
