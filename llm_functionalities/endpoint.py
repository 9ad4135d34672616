"""One model server: its API, whether it is healthy, and how busy this service keeps it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

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

from llm_functionalities.address import Address
from llm_functionalities.breaker import Breaker
from llm_functionalities.call import Call, working_on
from llm_functionalities.deadline import Deadline
from llm_functionalities.errors import (
    BadAnswer,
    DeadlineExceeded,
    EndpointDown,
    EndpointFailed,
    ModelError,
    Overloaded,
    Rejected,
    ServerFailed,
)
from llm_functionalities.generation import Generation

PROBE_SECONDS = 1.0
REFUSED_REQUEST = frozenset({400, 413, 422})
LONGEST_MESSAGE = 300


class Endpoint:
    """Calls one text-generation server. Every method runs in the thread of its caller, bounded by its `call`."""

    def __init__(self, address: Address, http: httpx2.Client, token: str | None = None, **breaker: Any) -> None:
        self.name = str(address)
        self.breaker = Breaker(f"endpoint {self.name}", self._probe, **breaker)
        self._http = http
        self._token = token
        self._lock = threading.Lock()
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def generate(self, prompt: str, generation: Generation, call: Call) -> str:
        """The model's answer, without the prompt. Raises ModelError."""
        with self._serving(call):
            answer = self._client(call, "/generate").text_generation(prompt, **_parameters(generation))
            if not isinstance(answer, str):
                raise BadAnswer(f"generated_text is a {type(answer).__name__}")
            return answer

    def stream(self, prompt: str, generation: Generation, call: Call) -> Iterator[str]:
        """The answer in pieces, as they come. Closing the iterator stops the generation. Raises ModelError."""
        with self._serving(call), self._client(call, "/generate_stream") as client:
            whole = False
            for output in client.text_generation(prompt, stream=True, details=True, **_parameters(generation)):
                if not output.token.special:
                    yield output.token.text
                whole = output.generated_text is not None
            if not whole:
                raise ServerFailed("the stream ended before the answer did")

    def _client(self, call: Call, path: str) -> InferenceClient:
        # A header of its own either way: without one, the client sends the machine's Hugging Face token.
        bearer = f"Bearer {self._token}" if self._token else None
        headers = cast(dict[str, str], {**call.headers, "authorization": bearer})
        return InferenceClient(model=self.name + path, token=self._token, headers=headers)

    def _probe(self) -> None:
        call = Call(Deadline.after(PROBE_SECONDS))
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        with working_on(call), _model_errors():
            status = self._http.get(f"{self.name}/health", headers=headers).status_code
            if status in (429, 500, 502, 503, 504):  # whatever else it says, it is there
                raise ServerFailed(f"/health answered {status}")

    @contextmanager
    def _serving(self, call: Call) -> Iterator[None]:
        self.breaker.check()
        with self._lock:
            self._in_flight += 1
        try:
            with working_on(call), _model_errors():
                yield
            self.breaker.succeeded()
        except EndpointDown as error:
            self.breaker.unreachable(error)
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
                self._in_flight -= 1


def _parameters(generation: Generation) -> dict[str, Any]:
    return {
        "max_new_tokens": generation.max_tokens,
        "grammar": generation.grammar.payload() if generation.grammar else None,
        "return_full_text": False,
    }


@contextmanager
def _model_errors() -> Iterator[None]:
    """Turns whatever a broken endpoint makes the client raise into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except HfHubHTTPError as error:
        raise _of_status(error.response.status_code, str(error)) from None
    except TextGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            raise _of_status(cause.response.status_code, str(error)) from None
        raise _of_report(error) from None
    except Exception as error:
        # The client parses the answer as it comes: a malformed one fails anywhere, with any exception.
        raise BadAnswer(_short(f"{type(error).__name__}: {error}")) from None


def _of_status(status: int, message: str) -> ModelError:
    text = _short(f"{status}: {message}")
    if status == 429:
        return Overloaded(text)
    return Rejected(text) if status in REFUSED_REQUEST else ServerFailed(text)


def _of_report(error: TextGenerationError) -> ModelError:
    """An error that came as an event of a stream."""
    if isinstance(error, OverloadedError):
        return Overloaded(_short(str(error)))
    if isinstance(error, ValidationError):
        return Rejected(_short(str(error)))
    kind = "" if isinstance(error, GenerationError | IncompleteGenerationError) else f"{type(error).__name__}: "
    return ServerFailed(_short(f"{kind}{error}"))


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}..."
