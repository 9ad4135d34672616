"""The context of a gRPC call, and the client through which services ask the model."""

import json
import re
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from math import inf
from re import _parser as regex_parser  # type: ignore[attr-defined]
from typing import Any, TypeVar

import grpc

from llm_functionalities.endpoint.call import REQUEST_ID, Deadline
from llm_functionalities.endpoint.endpoint import OptionalFeature
from llm_functionalities.endpoint.generation import GenerationParameters, Grammar
from llm_functionalities.errors import InvalidArgument, Rejected, UnusableGrammar
from llm_functionalities.model.model import Answer, Model, Question
from shared.logging import one_line
from shared.stubs import llm_pb2

# Trailing metadata: why a response is empty, and the message with which the model server rejected the request.
EMPTY_REASON = "empty-reason"
EMPTY_MESSAGE = "empty-message"

# Metadata that names the models of a call, from the largest to the smallest: "large,small".
MODELS = "models"

# Trailing metadata that names the models that answered such a call.
MODEL = "model"

LONGEST_METADATA_MESSAGE = 400

# The longest regular expression, in characters, that is checked here. Only the model server checks longer ones.
LONGEST_READ_REGEX = 2048

# The most characters of a grammar. Model servers refuse longer ones, and this many are parsed within milliseconds.
LONGEST_GRAMMAR = 128 * 1024

# The values that fields of `Sampling` may have, and how an error message describes them. All ranges exclude NaN.
_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value < inf, "of at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "above 0, at most 1"),
    "top_k": (lambda value: value >= 1, "of at least 1"),
    "repetition_penalty": (lambda value: 0 < value < inf, "above 0"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2"),
}

T = TypeVar("T")


class CallContext:
    """One gRPC call. `headers` pass its trace and its request id on to the model server.

    The trailing metadata has the request id as well, however the call ends.
    """

    def __init__(self, rpc: grpc.aio.ServicerContext, request_id: str, trace_headers: Mapping[str, str]) -> None:
        self._rpc = rpc
        # Names of the models that may answer, from the largest to the smallest; empty: any endpoint may.
        self.models: Sequence[str] = ()
        self._answered: set[str] = set()
        self._request_id = (REQUEST_ID, request_id)
        self.headers = {**trace_headers, REQUEST_ID: request_id}
        rpc.set_trailing_metadata((self._request_id,))
        # Set by the service once it has read the request.
        self.deadline: Deadline | None = None

    def remaining(self) -> float | None:
        """Returns the seconds until the caller's gRPC deadline; None if the caller set none."""
        remaining: float | None = self._rpc.time_remaining()
        return remaining

    def tell(self, answers: Sequence[Answer[T]]) -> None:
        """Puts the models that answered, and the reasons of missing answers, into the trailing metadata."""
        answered = {answer.generated.model for answer in answers} - {"", *self._answered}
        missing = [answer for answer in answers if answer.reason is not None]
        if not missing and not answered:
            return
        self._answered |= answered
        metadata = [self._request_id]
        if self._answered:
            metadata.append((MODEL, ",".join(name for name in self.models if name in self._answered)))
        if missing:
            metadata.append((EMPTY_REASON, ",".join(sorted({str(answer.reason) for answer in missing}))))
        messages = (answer.message for answer in missing if answer.reason == Rejected.reason)
        if message := next(messages, None):
            # Metadata is printable ASCII.
            line = one_line(message, LONGEST_METADATA_MESSAGE).encode("ascii", "backslashreplace").decode()
            metadata.append((EMPTY_MESSAGE, line))
        self._rpc.set_trailing_metadata(tuple(metadata))


@dataclass(frozen=True)
class ModelClient:
    """Asks the model for a call, with defaults for the fields that a request leaves out. Time-outs are in seconds."""

    model: Model
    default_timeout: float
    max_timeout: float
    max_tokens: int
    decisions: OptionalFeature = field(default_factory=OptionalFeature)

    def deadline(self, context: CallContext, timeout_ms: int = 0) -> Deadline:
        """Sets and returns the deadline of a call: the earliest of the request's, the caller's and `max_timeout`.

        Raises InvalidArgument for a negative time-out.
        """
        if timeout_ms < 0:
            raise InvalidArgument(
                f"`timeout` is {timeout_ms}; give milliseconds, or leave it out for {self.default_timeout:g} s"
            )
        context.deadline = Deadline.of_request(timeout_ms, context.remaining(), self.default_timeout, self.max_timeout)
        return context.deadline

    def generation(
        self,
        max_tokens: int,
        grammar: Grammar | None = None,
        *,
        grammar_is_optional: bool = False,
        adapter_id: str = "",
    ) -> GenerationParameters:
        """Returns the parameters of a generation. A `max_tokens` of 0 means the default.

        Raises InvalidArgument if `max_tokens` is negative.
        """
        if max_tokens < 0:
            raise InvalidArgument(f"`max_tokens` is {max_tokens}; give tokens, or leave it out for {self.max_tokens}")
        return GenerationParameters(max_tokens or self.max_tokens, grammar, grammar_is_optional, adapter_id or None)

    async def answers(
        self,
        context: CallContext,
        count: int,
        ask: Callable[[int], Question[T]],
        generation: GenerationParameters,
        deadline: Deadline,
    ) -> list[Answer[T]]:
        """Returns the answers to questions 0 to `count` - 1 by the deadline, and adds their outcome to the metadata."""
        answers = await self.model.answers(count, ask, generation, deadline, context.headers, models=context.models)
        context.tell(answers)
        return answers

    async def pieces(
        self, context: CallContext, prompt: str, generation: GenerationParameters, deadline: Deadline
    ) -> AsyncGenerator[Answer[str], None]:
        """Yields the model's answer in pieces, as it writes them. The last piece has the finish reason."""
        stream = self.model.stream(prompt, generation, deadline, context.headers, models=context.models)
        async with aclosing(stream) as answers:
            async for answer in answers:
                context.tell([answer])
                if answer.value is not None:
                    yield answer


def generation_of(
    model: ModelClient, request: llm_pb2.ModelRequest | llm_pb2.ModelBatchRequest | llm_pb2.WarmRequest
) -> GenerationParameters:
    """Returns the generation parameters of a request. Raises InvalidArgument or UnusableGrammar."""
    if "" in request.stop:
        raise InvalidArgument("`stop` has an empty text; leave it out")
    return replace(
        model.generation(request.max_tokens, grammar_of(request.grammar), adapter_id=request.adapter_id),
        sampling=sampling_of(request.sampling),
        stop=request.stop,
    )


def sampling_of(sampling: llm_pb2.Sampling) -> dict[str, Any]:
    """Returns the arguments of `InferenceClient.text_generation` for the fields that are set.

    Raises InvalidArgument for a value that is out of range.
    """
    given = {field.name: value for field, value in sampling.ListFields()}
    for name, (allows, range_) in _RANGES.items():
        if name in given and not allows(given[name]):
            raise InvalidArgument(f"`sampling.{name}` is {given[name]:g}; give a number {range_}, or leave it out")
    # Model servers refuse a temperature of 0, and sample only with `do_sample`.
    if given.get("temperature") == 0:
        return {name: value for name, value in given.items() if name.endswith("_penalty")} | {"do_sample": False}
    return given | {"do_sample": True} if given.keys() & {"temperature", "top_p", "top_k"} else given


def grammar_of(grammar: llm_pb2.Grammar) -> Grammar | None:
    """Returns the grammar of a request; None when it has none. Raises UnusableGrammar if it is invalid or too long."""
    form = grammar.WhichOneof("form")
    if form is None:
        return None
    if (length := len(getattr(grammar, form))) > LONGEST_GRAMMAR:
        raise UnusableGrammar(f"grammar.{form} has {length} characters; it must have at most {LONGEST_GRAMMAR}")
    if form == "regex":
        if not grammar.regex:
            raise UnusableGrammar("grammar.regex is empty; give a regular expression, or leave the grammar out")
        _check_regex(grammar.regex)
        return Grammar(regex=grammar.regex)
    try:
        schema = json.loads(grammar.json_schema)
    except (ValueError, RecursionError) as error:
        raise UnusableGrammar(f"grammar.json_schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise UnusableGrammar("grammar.json_schema is JSON, but not an object; give a JSON schema")
    return Grammar(json_schema=schema)


def _check_regex(regex: str) -> None:
    """Raises UnusableGrammar if `regex` is not a regular expression in Python's syntax.

    Expressions with Unicode properties, such as `\\p{Greek}`, are not checked: Oatmill takes them, Python does not.
    """
    if len(regex) > LONGEST_READ_REGEX or r"\p" in regex or r"\P" in regex:
        return
    try:
        # Parses without compiling, because compiling takes seconds for some expressions.
        with warnings.catch_warnings(action="ignore"):  # of what some later Python may read differently
            regex_parser.parse(regex)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnusableGrammar(f"grammar.regex is not a regular expression: {error}") from None
