"""One call of an application: how long it may take, on behalf of which trace, and what it is told about failures."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import grpc

from llm_functionalities.deadline import Deadline
from llm_functionalities.generation import Generation, Grammar
from llm_functionalities.model import Answer, Model, Question

EMPTY_REASON = "empty-reason"
"""Trailing metadata that says why an answer is empty."""

T = TypeVar("T")


class Context:
    """One gRPC call. `trace_headers` carry its trace on to the model server."""

    def __init__(self, rpc: grpc.aio.ServicerContext, trace_headers: Mapping[str, str]) -> None:
        self._rpc = rpc
        self.trace_headers = trace_headers
        self.deadline: Deadline | None = None
        """Set by the method, once it knows what the request says."""

    def remaining(self) -> float | None:
        """Returns the seconds that are left of the caller's own gRPC deadline; None when it has none."""
        remaining: float | None = self._rpc.time_remaining()
        return remaining

    def tell_reasons(self, answers: Iterable[Answer[T]]) -> None:
        """Puts the reasons of empty answers into the trailing metadata."""
        if reasons := sorted({answer.reason for answer in answers if answer.reason is not None}):
            self._rpc.set_trailing_metadata(((EMPTY_REASON, ",".join(reasons)),))


@dataclass(frozen=True)
class Front:
    """What every servicer needs: the model, and the defaults for what a request leaves open. Times are in seconds."""

    model: Model
    default_timeout: float
    max_timeout: float
    max_tokens: int

    def deadline(self, context: Context, timeout_ms: int = 0) -> Deadline:
        """Returns the call's deadline: the soonest of the request's, the caller's, and the longest time allowed."""
        context.deadline = Deadline.of_request(timeout_ms, context.remaining(), self.default_timeout, self.max_timeout)
        return context.deadline

    def generation(self, max_tokens: int, grammar: Grammar | None = None, *, wish: bool = False) -> Generation:
        """wish: a server that takes no grammars may answer without it, as the answer is parsed in any case."""
        return Generation(max_tokens if max_tokens > 0 else self.max_tokens, grammar, wish)

    async def answer(
        self, context: Context, ask: Callable[[], Question[T]], generation: Generation, deadline: Deadline
    ) -> T | None:
        """Returns what the question's parser makes of the model's answer; None when there is none, or none of use."""
        answer = await self.model.answer(ask, generation, deadline, context.trace_headers)
        context.tell_reasons([answer])
        return answer.value

    async def answers(
        self,
        context: Context,
        count: int,
        ask: Callable[[int], Question[T]],
        generation: Generation,
        deadline: Deadline,
    ) -> list[Answer[T]]:
        """Returns the answers to questions 0 to `count` - 1. The deadline holds for all of them together."""
        answers = await self.model.answers(count, ask, generation, deadline, context.trace_headers)
        context.tell_reasons(answers)
        return answers

    async def pieces(
        self, context: Context, prompt: str, generation: Generation, deadline: Deadline
    ) -> AsyncGenerator[str, None]:
        """Yields the model's answer in pieces, as it writes them."""
        async with aclosing(self.model.stream(prompt, generation, deadline, context.trace_headers)) as answers:
            async for answer in answers:
                context.tell_reasons([answer])
                if answer.value:
                    yield answer.value
