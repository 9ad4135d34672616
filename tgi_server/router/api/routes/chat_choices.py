"""The choices of a chat request: each is a call of a tool or a text, and which of them is decided here."""

import asyncio
from collections.abc import Callable
from uuid import uuid4

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.router.api.requests import Exchange
from tgi_server.router.api.routes.chat_prompt import ChatPlan, ChatPrompt, prompt_for_text, prompt_with_tools
from tgi_server.router.api.routes.openai import usage_json
from tgi_server.router.errors import InvalidTool, RouterError
from tgi_server.router.text.token_stream import AnyStream, Formatter, OnEnd
from tgi_server.router.text.tools import NO_TOOL, ToolCallReader

# Takes the next piece of a call: its id, the name with the first piece, arguments, the finish reason with the last.
Write = Callable[[str, str | None, str, str | None], None]


class ToolCallFormatter:
    """Reads the call of a tool as it is generated.

    named: done once the name is known. It may be `no_tool`: then nothing is written, and the end is not told.
    arguments: JSON in pieces.
    """

    __slots__ = ("_on_end", "_reader", "_write", "arguments", "call_id", "named")

    def __init__(self, on_end: OnEnd, write: Write | None) -> None:
        self._on_end = on_end
        self._write = write
        self._reader = ToolCallReader()
        self.call_id = f"call_{uuid4().hex[:24]}"
        self.arguments: list[str] = []
        self.named: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def token(
        self,
        stream: AnyStream,
        token_id: int,
        text: str,
        visible: str,
        logprob: float | None,
        top: pb.TopTokens | None,
    ) -> None:
        self.rest(stream, visible)

    def rest(self, stream: AnyStream, text: str) -> None:
        known = self._reader.name is not None
        arguments = self._reader.feed(text)
        name = self._reader.name
        if name is None:
            return
        if not self.named.done():
            self.named.set_result(name)
        if name == NO_TOOL:
            return
        if not known:
            self._take(name, arguments, None)
        elif arguments:
            self._take(None, arguments, None)
        if stream.finish_reason is not None:
            self._take(None, self._reader.end(), tool_finish_reason(stream.finish_reason))

    def ended(self, error: RouterError | None) -> None:
        """Passes the end of the sequence on to whoever waits for it: for the name, or for the call."""
        if not self.named.done():
            fault = InvalidTool("the answer ended before it named a tool; more `max_tokens` may help")
            self.named.set_exception(error or fault)
        elif error is not None or self._reader.name != NO_TOOL:
            self._on_end(error)

    def _take(self, name: str | None, arguments: str, reason: str | None) -> None:
        self.arguments.append(arguments)
        if self._write is not None:
            self._write(self.call_id, name, arguments, reason)


def tool_finish_reason(reason: FinishReason) -> str:
    """Returns OpenAI's finish reason of a call: a call that was cut off is not whole."""
    return "length" if reason is FinishReason.LENGTH else "tool_calls"


class ChatChoices:
    """Generates the choices of one request. A choice that names no tool is generated again, as a text.

    streams: the sequences that the response shows, by the choice's index. prompt_tokens: of the prompt that is told.
    """

    def __init__(self, exchange: Exchange, plan: ChatPlan, on_end: OnEnd) -> None:
        """on_end: told of the end of each choice."""
        self._exchange = exchange
        self._plan = plan
        self._on_end = on_end
        self.streams: dict[int, AnyStream] = {}
        self.prompt_tokens = 0

    async def begin(self, text: Callable[[int], Formatter], write: Callable[[int], Write] | None = None) -> str:
        """Returns the prompt's text once all choices are decided and being generated.

        text, write: make what writes the choice of that index.

        Raises RouterError.
        """
        service, plan = self._exchange.service, self._plan
        undecided = list(range(plan.choices))
        prompt: ChatPrompt | None = None
        if plan.tools:
            prompt = await prompt_with_tools(service, plan)
            self.prompt_tokens = len(prompt.checked.input_ids)
            undecided = await self._call_tools(prompt, write)
        if undecided:
            prompt = await prompt_for_text(service, plan.request, plan.size)
            self.prompt_tokens = len(prompt.checked.input_ids)
            for index, checked in zip(undecided, prompt.checked.times(len(undecided)), strict=True):
                self.streams[index] = self._exchange.generate(
                    checked,
                    text(index),
                    self._on_end,
                    reveal_stop=plan.request.include_stop_str_in_output,
                    logprobs=plan.logprobs is not None,
                )
        assert prompt is not None
        return prompt.text

    def usage(self) -> str:
        """Returns JSON of what the choices have used. The prompt is one for all of them."""
        cached = self.streams[0].cached_tokens if 0 in self.streams else 0
        return usage_json(self.prompt_tokens, self.streams.values(), cached)

    async def _call_tools(self, prompt: ChatPrompt, write: Callable[[int], Write] | None) -> list[int]:
        """Begins a call for each choice. Returns the choices that call no tool, once that is known of all."""
        calls: list[ToolCallFormatter] = []
        for index, checked in enumerate(prompt.checked.times(self._plan.choices)):
            call = ToolCallFormatter(self._on_end, write(index) if write is not None else None)
            calls.append(call)
            self.streams[index] = self._exchange.generate(checked, call, call.ended, reveal_stop=False, logprobs=False)
        names = await self._exchange.wait_for(asyncio.gather(*(call.named for call in calls)))
        undecided = [index for index, name in enumerate(names) if name == NO_TOOL]
        for index in undecided:
            self._exchange.cancel(self.streams.pop(index))
        return undecided
