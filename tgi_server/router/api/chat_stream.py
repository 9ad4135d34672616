"""A conversation's answer as it is generated."""

import asyncio

from tgi_server.router.api.chat_request import ChatPlan, ChatPrompt, prompt_for_text, prompt_with_tools
from tgi_server.router.api.chat_sinks import ChatChunkSink, ToolChunkSink
from tgi_server.router.api.exchange import Exchange
from tgi_server.router.api.openai import DONE, Envelope, usage_json
from tgi_server.router.api.outbox import Outbox, event
from tgi_server.router.api.sequences import unless_client_leaves
from tgi_server.router.api.streaming import EventStream, StreamEnd
from tgi_server.router.api.timing import stream_headers
from tgi_server.router.sinks import SequenceSink
from tgi_server.router.tool_grammar import NO_TOOL


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
            prompt = await prompt_for_text(service, self._plan.request)
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
