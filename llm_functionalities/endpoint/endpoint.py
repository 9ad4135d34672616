"""One text-generation server: its requests, its health, and how many requests it works on.

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
# Of routes that not every server has: they say nothing of the others.
_NO_ROUTE = frozenset({404, 405, 501})
UNHEALTHY = frozenset({429, 500, 502, 503, 504})
LONGEST_MESSAGE = 300

# Envoy's header: the milliseconds after which the response is useless.
_TIME_LEFT = "x-envoy-expected-rq-timeout-ms"

# Oatmill's server says with these codes that the time has passed, or is too short for what it has to do.
_ERROR_CODE = "x-error-code"
_ERROR_OF_CODE: Mapping[str, type[ModelError]] = {
    "deadline_exceeded": DeadlineExceeded,
    "deadline_unreachable": NoTimeLeft,
}
# An event of a stream has no code: what fails within these seconds of the deadline does so because of it.
_ABOUT_NOW_SECONDS = 0.05

# Events that a stream may have besides one for each token.
MORE_EVENTS = 16

_SURROGATE = re.compile("[\ud800-\udfff]")

# Seconds after which a feature that a server lacked is tried again.
TRY_AGAIN_SECONDS = 300.0

# Oatmill's server says so of a grammar that is too complex, and when it has too many to compile. It may take others.
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
        """model: the one that answers, of a server that has several; empty: the server's own choice."""
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
        """True while requests should go to other endpoints: this one failed, and is not known to answer again."""
        return self.breaker.ejected or (self.breaker.on_probation and self._in_flight > 0)

    def generate(self, prompt: str, generation: GenerationParameters, call: Call) -> GeneratedText:
        """Returns the model's answer, without the prompt. Raises ModelError.

        An optional grammar is left out where the server takes none. A server generates nothing for a request that it
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
            # The `details` of a response would say the same, for which the server would have to compute all logprobs.
            headers = call.response_headers or {}
            generated = _count(headers.get("x-generated-tokens"))
            reason = headers.get("x-finish-reason", "")
            if not reason and generated:
                reason = "length" if generated >= generation.max_tokens else "eos_token"
            return GeneratedText(_text(answer), _text(reason), _count(headers.get("x-prompt-tokens")), generated)

    def stream(self, prompt: str, generation: GenerationParameters, call: Call) -> Generator[GeneratedText, None, None]:
        """Yields the answer in pieces, as they come. Closing the iterator stops the generation. Raises ModelError."""
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
        """Returns the response to a body of JSON, as it is. Raises ModelError, such as NotServed.

        counted: the request counts as load.
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
        # The header is set either way, because the client would send the machine's Hugging Face token without it.
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
        except NoTimeLeft:  # others, which have more time, are answered
            self.breaker.succeeded()
            raise
        except ResponseTooLarge:  # says nothing of the endpoint's health, for better or worse
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
    """Remembers for a while that a server lacks a feature. Then another server may have come in its place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._try_at = 0.0
        self._is_missing = False

    def worth_a_try(self) -> bool:
        return time.monotonic() >= self._try_at

    def missing(self) -> bool:
        """Notes that the server lacks the feature. Returns True if that is news. Used from many threads."""
        with self._lock:
            known, self._is_missing = self._is_missing, True
            self._try_at = time.monotonic() + TRY_AGAIN_SECONDS
        return not known

    def found(self) -> None:
        self._is_missing = False


def _concerns_one_grammar(message: str) -> bool:
    """Returns True if a server's message says nothing of the grammars of other requests."""
    return any(words in message for words in _ONE_GRAMMAR)


def _text(answer: Any) -> str:
    """Returns `answer` with U+FFFD for each half of a surrogate pair: JSON may have them, gRPC's messages may not.

    Raises BadResponse if it is not a text.
    """
    if not isinstance(answer, str):
        raise BadResponse(f"the answer is a {type(answer).__name__}, not a text")
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", answer)


def _count(value: Any) -> int:
    """Returns a number of tokens as a server writes it; 0 if it is none."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


@contextmanager
def _model_errors(call: Call) -> Iterator[None]:
    """Turns whatever the client raises into a ModelError."""
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
        # The client parses the response as it comes, and a malformed one may fail anywhere, with any exception.
        raise BadResponse(message) from None


def _of_status(status: int, message: str, call: Call) -> ModelError:
    text = _short(f"{status}: {message}")
    code = (call.response_headers or {}).get(_ERROR_CODE, "")
    if code in _ERROR_OF_CODE:
        return _ERROR_OF_CODE[code](text)
    error = Rejected if _concerns_one_grammar(text) else _ERROR_OF_STATUS.get(status, ServerFailed)
    return error(text)


def _of_report(error: TextGenerationError, call: Call) -> ModelError:
    """Returns the error that came as an event of a stream."""
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
