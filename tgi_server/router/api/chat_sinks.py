"""Tokens of a chat answer, as OpenAI's chunks."""

import asyncio
import json
from uuid import uuid4

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.router.api.openai import Envelope, finish_reason
from tgi_server.router.api.outbox import Outbox, event
from tgi_server.router.errors import InvalidTool, RouterError
from tgi_server.router.sinks import OnEnd, SequenceSink
from tgi_server.router.stopping import StopSequences
from tgi_server.router.token_json import number, quoted
from tgi_server.router.tokenization import TextTokenizer
from tgi_server.router.tool_calls import ToolCallReader
from tgi_server.router.tool_grammar import NO_TOOL


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
