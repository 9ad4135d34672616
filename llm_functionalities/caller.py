"""What a gRPC call tells about its caller's wishes: how long, how much, and on behalf of which trace."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import grpc

from llm_functionalities.deadline import Deadline
from llm_functionalities.empties import EmptyAnswers
from llm_functionalities.generation import Generation, Grammar
from llm_functionalities.model import Answer, Model
from shared.tracing import trace_headers

Context: TypeAlias = grpc.aio.ServicerContext
EMPTY_REASON = "empty-reason"
"""Trailing metadata that says why an answer is empty."""
LOGGED_CHARACTERS = 80


UNUSABLE = "unusable"
"""The reason of an empty answer where the model said something that the workflow cannot use."""

T = TypeVar("T")
Parser = Callable[[str], T | None]
"""What a workflow makes of a model's answer; None when it is of no use. It never raises."""


@dataclass(frozen=True)
class Front:
    """What every servicer needs: the model, the defaults for what a request leaves open, and a word on failures."""

    model: Model
    empties: EmptyAnswers
    default_timeout: float
    max_tokens: int

    def deadline(self, context: Context, timeout_ms: int = 0) -> Deadline:
        return Deadline.of_request(timeout_ms, context.time_remaining(), self.default_timeout)

    def generation(self, max_tokens: int, grammar: Grammar | None = None, *, wish: bool = False) -> Generation:
        """wish: a server that takes no grammars may answer without it, as the answer is parsed in any case."""
        return Generation(max_tokens if max_tokens > 0 else self.max_tokens, grammar, wish)

    async def answer(self, context: Context, prompt: str, generation: Generation, deadline: Deadline) -> str:
        """The model's answer to one prompt, empty when there is none."""
        answer = await self.model.answer(prompt, generation, deadline, trace_headers())
        _tell_reasons(context, [answer])
        return answer.text

    async def answers(
        self, context: Context, prompts: Sequence[str | None], generation: Generation, deadline: Deadline
    ) -> list[str]:
        """The answers to several prompts, in their order, with empty ones in the place of those that failed.

        Where a prompt is None there is nothing to ask, and the answer is empty.
        """
        asked = [prompt for prompt in prompts if prompt is not None]
        answers = await self.model.answers(asked, generation, deadline, trace_headers())
        _tell_reasons(context, answers)
        texts = iter(answers)
        return ["" if prompt is None else next(texts).text for prompt in prompts]

    async def pieces(
        self, context: Context, prompt: str, generation: Generation, deadline: Deadline
    ) -> AsyncGenerator[str, None]:
        """The model's answer in pieces, as it writes them."""
        async with aclosing(self.model.stream(prompt, generation, deadline, trace_headers())) as answers:
            async for answer in answers:
                _tell_reasons(context, [answer])
                if answer.text:
                    yield answer.text

    async def parsed(
        self, context: Context, prompt: str, generation: Generation, deadline: Deadline, parse: Parser[T]
    ) -> T | None:
        """What `parse` makes of the model's answer; None when there is none, or none of use."""
        return self.understood(context, await self.answer(context, prompt, generation, deadline), parse)

    async def all_parsed(
        self,
        context: Context,
        prompts: Sequence[str | None],
        generation: Generation,
        deadline: Deadline,
        parse: Parser[T],
    ) -> list[T | None]:
        """As `parsed`, for several prompts at once."""
        texts = await self.answers(context, prompts, generation, deadline)
        return [self.understood(context, text, parse) for text in texts]

    def understood(self, context: Context, text: str, parse: Parser[T]) -> T | None:
        """What `parse` makes of an answer, of which there may be none."""
        if not text:
            return None
        result = parse(text)
        if result is None:
            message = f"no use can be made of the model's answer {text[:LOGGED_CHARACTERS]!r}"
            self.empties.count(UNUSABLE, message)
            context.set_trailing_metadata(((EMPTY_REASON, UNUSABLE),))
        return result


def _tell_reasons(context: Context, answers: Sequence[Answer]) -> None:
    if reasons := sorted({answer.reason for answer in answers if answer.reason is not None}):
        context.set_trailing_metadata(((EMPTY_REASON, ",".join(reasons)),))
