"""The answer of /v1/chat/completions as chunks."""

import asyncio
import json
from uuid import uuid4

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.router.api.event_stream import EventStream, Outbox, StreamEnd, event
from tgi_server.router.api.requests import Exchange, stream_headers, unless_client_leaves
from tgi_server.router.api.responses import number, quoted
from tgi_server.router.api.routes.chat_prompt import ChatPlan, ChatPrompt, prompt_for_text, prompt_with_tools
from tgi_server.router.api.routes.openai import DONE, Envelope, finish_reason, usage_json
from tgi_server.router.errors import InvalidTool, RouterError
from tgi_server.router.text.detokenizer import StopSequences
from tgi_server.router.text.token_stream import OnEnd, SequenceSink
from tgi_server.router.text.tokenizer import TextTokenizer
from tgi_server.router.text.tools import NO_TOOL, ToolCallReader


def tool_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def logprob_entry(tokenizer: TextTokenizer, text: str, logprob: float | None, top: pb.TopTokens | None) -> str:
    """One token of `logprobs.content`."""
    tops = [] if top is None else list(zip(top.ids, top.logprobs, strict=True))
    alternatives = ",".join(f"{{{_logprob(tokenizer.token_text(each), value)}}}" for each, value in tops)
    return f'{{{_logprob(text, logprob)},"top_logprobs":[{alternatives}]}}'


def _logprob(text: str, logprob: float | None) -> str:
    return f'"token":{quoted(text)},"logprob":{number(logprob)},"bytes":{json.dumps(list(text.encode()))}'


class ChatChunkSink(SequenceSink):
    """Writes a chunk for each token that shows something; of the others, the logprobs wait for the next chunk."""

    __slots__ = ("_envelope", "_index", "_logprobs", "_outbox", "_usage")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        input_ids: list[int],
        stops: StopSequences | None,
        on_end: OnEnd,
        *,
        outbox: Outbox,
        envelope: Envelope,
        index: int,
        logprobs: bool,
        usage: str | None,
    ) -> None:
        """index: of the choice. usage: what each chunk says of it."""
        super().__init__(tokenizer, input_ids, stops, on_end)
        self._outbox = outbox
        self._envelope = envelope
        self._index = index
        self._logprobs: list[str] | None = [] if logprobs else None
        self._usage = usage

    def _take(
        self, token_id: int, text: str, visible: str, logprob: float | None, top: pb.TopTokens | None, *, special: bool
    ) -> None:
        if self._logprobs is not None:
            self._logprobs.append(logprob_entry(self._tokenizer, text, logprob, top))
        if not visible and self.finish_reason is None:
            return
        logprobs = "null"
        if self._logprobs is not None:
            logprobs = f'{{"content":[{",".join(self._logprobs)}]}}'
            self._logprobs.clear()
        reason = "null" if self.finish_reason is None else f'"{finish_reason(self.finish_reason)}"'
        choice = (
            f'{{"index":{self._index},"delta":{{"role":"assistant","content":{quoted(visible)}}},'
            f'"logprobs":{logprobs},"finish_reason":{reason}}}'
        )
        self._outbox.write(event(self._envelope.wrap(choice, self._usage)))


class ToolChunkSink(SequenceSink):
    """Writes the call of a tool as it is generated.

    named: done once the name is known. It may be `no_tool`: then the sequence ends, and nothing is written.
    """

    __slots__ = ("_call_id", "_envelope", "_index", "_outbox", "_reader", "_usage", "named")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        input_ids: list[int],
        stops: StopSequences | None,
        on_end: OnEnd,
        *,
        outbox: Outbox,
        envelope: Envelope,
        index: int,
        usage: str | None,
    ) -> None:
        super().__init__(tokenizer, input_ids, stops, on_end)
        self._outbox = outbox
        self._envelope = envelope
        self._index = index
        self._usage = usage
        self._reader = ToolCallReader()
        self._call_id = tool_call_id()
        self.named: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def failed(self, error: RouterError) -> None:
        if not self.named.done():
            self.named.set_exception(error)
        else:
            super().failed(error)

    def finished(self, reason: FinishReason) -> None:
        if not self.named.done():
            self.named.set_exception(InvalidTool("the answer ended before it named a tool; more `max_tokens` may help"))
        elif self._reader.name != NO_TOOL:
            super().finished(reason)

    def _take(
        self, token_id: int, text: str, visible: str, logprob: float | None, top: pb.TopTokens | None, *, special: bool
    ) -> None:
        known = self._reader.name is not None
        arguments = self._reader.feed(visible)
        if not known and self._reader.name is not None:
            if not self.named.done():
                self.named.set_result(self._reader.name)
            if self._reader.name != NO_TOOL:
                self._write(f'{{"name":{quoted(self._reader.name)},"arguments":{quoted(arguments)}}}')
        elif known and arguments and self._reader.name != NO_TOOL:
            self._write(f'{{"arguments":{quoted(arguments)}}}')
        if self.finish_reason is not None and self._reader.name not in (None, NO_TOOL):
            reason = "length" if self.finish_reason is FinishReason.LENGTH else "tool_calls"
            self._write(f'{{"arguments":{quoted(self._reader.end())}}}', f'"{reason}"')

    def _write(self, function: str, reason: str = "null") -> None:
        call = f'{{"index":0,"id":"{self._call_id}","type":"function","function":{function}}}'
        choice = (
            f'{{"index":{self._index},"delta":{{"role":"assistant","tool_calls":[{call}]}},'
            f'"logprobs":null,"finish_reason":{reason}}}'
        )
        self._outbox.write(event(self._envelope.wrap(choice, self._usage)))


class ChatStream:
    """A conversation's answer as chunks: choices that may call a tool say first whether they do."""

    def __init__(self, exchange: Exchange, plan: ChatPlan) -> None:
        self._exchange = exchange
        self._plan = plan
        options = plan.request.stream_options
        self._usage = "null" if options is not None and options.include_usage else None
        self._outbox = Outbox()
        self._envelope = Envelope("chat.completion.chunk", "chatcmpl", exchange.service.model)
        self._sinks: dict[int, SequenceSink] = {}
        self._prompt_tokens = 0
        self._end = StreamEnd(
            self._outbox,
            exchange.path,
            exchange.release,
            sequences=plan.choices,
            last_words=self._last_words,
            trailer=DONE,
        )

    async def open(self) -> EventStream:
        service = self._exchange.service
        choices = list(range(self._plan.choices))
        prompt: ChatPrompt | None = None
        if self._plan.tools:
            prompt = await prompt_with_tools(service, self._plan)
            choices = await self._undecided(prompt, choices)
        if choices:
            prompt = await prompt_for_text(service, self._plan.request, self._plan.size)
            self._say(prompt, choices)
        assert prompt is not None
        self._prompt_tokens = len(prompt.checked.input_ids)
        headers = stream_headers(self._exchange, characters=len(prompt.text))
        return EventStream(self._outbox, headers, self._exchange.close)

    async def _undecided(self, prompt: ChatPrompt, choices: list[int]) -> list[int]:
        """Starts calls of tools; gives back the choices that call none, once that is known of all."""
        sinks: list[ToolChunkSink] = []
        for index, checked in zip(choices, prompt.checked.times(len(choices)), strict=True):
            sink = ToolChunkSink(
                self._exchange.service.tokenizer,
                checked.input_ids,
                checked.stop_sequences(reveal=False),
                self._end,
                outbox=self._outbox,
                envelope=self._envelope,
                index=index,
                usage=self._usage,
            )
            sinks.append(sink)
            self._sinks[index] = sink
            self._exchange.submit(checked, sink, logprobs=False)
        names = await unless_client_leaves(self._exchange, asyncio.gather(*(sink.named for sink in sinks)))
        undecided = [index for index, name in zip(choices, names, strict=True) if name == NO_TOOL]
        for index in undecided:
            self._exchange.cancel(sinks[index])
        return undecided

    def _say(self, prompt: ChatPrompt, choices: list[int]) -> None:
        for index, checked in zip(choices, prompt.checked.times(len(choices)), strict=True):
            sink = ChatChunkSink(
                self._exchange.service.tokenizer,
                checked.input_ids,
                checked.stop_sequences(reveal=False),
                self._end,
                outbox=self._outbox,
                envelope=self._envelope,
                index=index,
                logprobs=self._plan.logprobs,
                usage=self._usage,
            )
            self._sinks[index] = sink
            self._exchange.submit(checked, sink, logprobs=self._plan.logprobs)

    def _last_words(self) -> bytes:
        if self._usage is None:
            return b""
        return event(self._envelope.wrap("", usage_json(self._prompt_tokens, self._sinks.values())))
