"""The context of a call, and the client with which services ask the model on behalf of calls."""

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import grpc

from llm_functionalities.endpoint.call import Deadline
from llm_functionalities.endpoint.generation import GenerationParameters, Grammar
from llm_functionalities.errors import UnusableGrammar
from llm_functionalities.model.model import Answer, Model, Question
from shared.stubs import llm_pb2

# Trailing metadata that says why a response is empty.
EMPTY_REASON = "empty-reason"

# Characters of a grammar. Model servers take no longer ones, and this many are read within milliseconds.
LONGEST_GRAMMAR = 128 * 1024

T = TypeVar("T")


class CallContext:
    """One gRPC call. `trace_headers` carry its trace on to the model server."""

    def __init__(self, rpc: grpc.aio.ServicerContext, trace_headers: Mapping[str, str]) -> None:
        self._rpc = rpc
        self.trace_headers = trace_headers
        # The service sets it once it has read what the request says.
        self.deadline: Deadline | None = None

    def remaining(self) -> float | None:
        """Returns the seconds that are left of the caller's own gRPC deadline; None when it has none."""
        remaining: float | None = self._rpc.time_remaining()
        return remaining

    def tell_reasons(self, answers: Iterable[Answer[T]]) -> None:
        """Puts the reasons of missing answers into the trailing metadata."""
        if reasons := sorted({answer.reason for answer in answers if answer.reason is not None}):
            self._rpc.set_trailing_metadata(((EMPTY_REASON, ",".join(reasons)),))


@dataclass(frozen=True)
class ModelClient:
    """Asks the model on behalf of calls, with defaults for what a request leaves open. Time-outs are in seconds."""

    model: Model
    default_timeout: float
    max_timeout: float
    max_tokens: int

    def deadline(self, context: CallContext, timeout_ms: int = 0) -> Deadline:
        """Returns the soonest of the request's deadline, the caller's gRPC deadline and the longest time allowed."""
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
        """Returns the parameters of a generation. With a `max_tokens` of 0 the default holds."""
        most = max_tokens if max_tokens > 0 else self.max_tokens
        return GenerationParameters(most, grammar, grammar_is_optional, adapter_id or None)

    async def answer(
        self, context: CallContext, ask: Callable[[], Question[T]], generation: GenerationParameters, deadline: Deadline
    ) -> T | None:
        """Returns the parsed answer of the model; None when there is none, or it is of no use."""
        answer = await self.model.answer(ask, generation, deadline, context.trace_headers)
        context.tell_reasons([answer])
        return answer.value

    async def answers(
        self,
        context: CallContext,
        count: int,
        ask: Callable[[int], Question[T]],
        generation: GenerationParameters,
        deadline: Deadline,
    ) -> list[Answer[T]]:
        """Returns the answers to questions 0 to `count` - 1. The deadline holds for all of them together."""
        answers = await self.model.answers(count, ask, generation, deadline, context.trace_headers)
        context.tell_reasons(answers)
        return answers

    async def pieces(
        self, context: CallContext, prompt: str, generation: GenerationParameters, deadline: Deadline
    ) -> AsyncGenerator[str, None]:
        """Yields the model's answer in pieces, as it writes them."""
        async with aclosing(self.model.stream(prompt, generation, deadline, context.trace_headers)) as answers:
            async for answer in answers:
                context.tell_reasons([answer])
                if answer.value:
                    yield answer.value


def grammar_of(grammar: llm_pb2.Grammar) -> Grammar | None:
    """Returns the grammar of a request; None when it has none. Raises UnusableGrammar if no answer could follow it."""
    form = grammar.WhichOneof("form")
    if form is None:
        return None
    if (length := len(getattr(grammar, form))) > LONGEST_GRAMMAR:
        raise UnusableGrammar(f"grammar.{form} has {length} characters; it must have at most {LONGEST_GRAMMAR}")
    if form == "regex":
        if not grammar.regex:
            raise UnusableGrammar("grammar.regex is empty; give a regular expression, or leave the grammar out")
        return Grammar(regex=grammar.regex)
    try:
        schema = json.loads(grammar.json_schema)
    except (ValueError, RecursionError) as error:
        raise UnusableGrammar(f"grammar.json_schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise UnusableGrammar("grammar.json_schema is JSON, but not an object; give a JSON schema")
    return Grammar(json_schema=schema)
