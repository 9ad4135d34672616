"""/v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.routing import Route

from shared.partial_json import MemberReader
from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason, GenerationOptions
from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import OPENAI_ERRORS
from tgi_server.router.api.encoding import event, to_json
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.generation import RequestGeneration
from tgi_server.router.api.routes.completion_logprobs import LogprobEntries
from tgi_server.router.api.routes.openai import (
    DONE,
    envelope,
    finish_reason,
    openai_options,
    requested_form,
    usage_of,
    wants_members,
)
from tgi_server.router.api.routes.prompt_images import markdown_prompt
from tgi_server.router.errors import ContextOverflow, InvalidRequest
from tgi_server.router.option_reader import Given
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.completions import (
    Chunk,
    CompletionComplete,
    CompletionFinal,
    CompletionLogprobs,
    CompletionRequest,
)
from tgi_server.router.schemas.openai import CompletedMember, Usage
from tgi_server.router.service import Service
from tgi_server.router.submission import PreparedRequest
from tgi_server.router.text.special_tokens import RenderedPrompt
from tgi_server.router.text.token_stream import AnyStream, CollectedTokens, TokenStream
from tgi_server.router.text.tokenizer import TextTokenizer


def completion_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, OPENAI_ERRORS)
    summary = "Continue one prompt or several, in one piece or as server-sent events"
    routes.receive("/v1/completions", summary, CompletionRequest, complete, CompletionFinal, Chunk)
    return routes


# Maximum number of prompt tokens and alternatives in one response, about 35 bytes each. A stream sends the tokens of a
# prompt in one event.
_MOST_ECHOED, _MOST_STREAMED = 2**21, 2**16


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A validated request.

    prompts: the prompts as text. sequences: `attempts` sequences for each prompt, in order; `choices` of them are
    returned. logprobs: number of alternatives reported for each token; None: no log-probabilities are reported.
    generates: False for a request for 0 tokens, whose answer is left out, although a token is computed.
    """

    request: CompletionRequest
    prompts: Sequence[str]
    sequences: Sequence[PreparedRequest]
    choices: int
    attempts: int
    logprobs: int | None
    generates: bool

    @property
    def prompt_tokens(self) -> int:
        return sum(len(sequence.input_ids) for sequence in self.sequences[:: self.attempts])

    @property
    def characters(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def echoed(self) -> int:
        """Number of prompt tokens and alternatives in the response."""
        return self.choices * self.prompt_tokens * (1 + (self.logprobs or 0)) if self.request.echo else 0

    def echo(self, sequence: int) -> str:
        """Returns the prompt if a sequence's text begins with it, else an empty text."""
        return self.prompts[sequence // self.attempts] if self.request.echo else ""

    def entries(self, tokenizer: TextTokenizer, sequence: int) -> LogprobEntries:
        """Returns a collector for the log-probabilities of a sequence."""
        as_text = isinstance(self.request.prompt.root[sequence // self.attempts], str)
        show_special = not self.sequences[sequence].options.skip_special_tokens
        return LogprobEntries(tokenizer, show_special=show_special, as_text=as_text)

    def usage(
        self, streams: Sequence[AnyStream], prompt_tokens: int, generation: RequestGeneration | None = None
    ) -> Usage:
        """Returns the usage of sequences. Sequences with the same prompt count its cached tokens once.

        generation: adds the explanation of prefix-cache misses, if it was requested.
        """
        cached = sum(stream.cached_tokens for stream in streams[:: self.attempts])
        miss = generation.miss if generation is not None and self.request.explain_prefix else None
        return usage_of(prompt_tokens, streams if self.generates else (), cached, miss)


async def complete(admission: Admission, request: CompletionRequest) -> Response:
    plan = await plan_completions(admission, request)
    most = _MOST_STREAMED if request.stream else _MOST_ECHOED
    if plan.echoed > most:
        raise InvalidRequest.at(
            "echo",
            f"would return {plan.echoed} prompt tokens and alternatives; at most {most} are returned "
            f"{'in a stream' if request.stream else 'in a response'}; lower `n`, `logprobs` or the prompts' length",
        )
    admission.reserve(len(plan.sequences) - 1)
    generation = RequestGeneration(admission)
    return _stream(generation, plan) if request.stream else await _whole(generation, plan)


async def plan_completions(admission: Admission, request: CompletionRequest) -> CompletionPlan:
    """Validates a request and prepares its sequences. Raises InvalidRequest."""
    service, prompts, size = admission.service, request.prompt.root, admission.size
    if "" in prompts:
        raise InvalidRequest.at("prompt", "must not be empty")
    options = openai_options(admission, request, Dialect.COMPLETIONS)
    choices, attempts = options.n, options.best_of or options.n
    logprobs = options.report.top_n_tokens if options.report.logprobs else None
    most = service.options.limits_of(Dialect.COMPLETIONS).max_client_batch_size
    if not 0 < (wanted := len(prompts) * attempts) <= most:
        times = "" if attempts == 1 else " times `n`" if attempts == choices else " times `best_of`"
        raise InvalidRequest(f"the number of prompts{times} must be 1 to {most}, not {wanted}", param="prompt")
    report = options.report
    if attempts > choices:
        report = replace(report, logprobs=True)
    if request.echo and logprobs is not None:
        if service.model.encoder_decoder:
            raise InvalidRequest.at("echo", "cannot have `logprobs` if an encoder reads the prompt")
        report = replace(report, prefill_logprobs=True, prefill_top_n=logprobs)
    generates = Given.by(request, Dialect.COMPLETIONS).values.get("max_new_tokens") != 0
    stopping = options.stopping if generates else replace(options.stopping, max_new_tokens=1)
    options = replace(options, report=report, stopping=stopping)

    def prepare() -> tuple[GenerationOptions, list[RenderedPrompt]]:
        return replace(options, grammar=requested_form(request)), _rendered(service, prompts, options.truncate)

    options, rendered = await service.text.threads.handle_text(size, prepare)
    rendered = [
        await markdown_prompt(admission, each.text, "prompt", options.cache_salt) if each.token_ids is None else each
        for each in rendered
    ]
    if request.echo and any(each.images for each in rendered):
        raise InvalidRequest.at("echo", "cannot be used with images: their tokens are not text")
    prepared = [
        await service.preparer.prepare(
            each,
            options,
            Dialect.COMPLETIONS,
            client=admission.owner,
            add_special_tokens=request.add_special_tokens,
            size=size,
        )
        for each in rendered
    ]
    sequences = [each for prompt in prepared for each in prompt.times(attempts)]
    return CompletionPlan(request, [each.text for each in rendered], sequences, choices, attempts, logprobs, generates)


def _rendered(service: Service, prompts: Sequence[str | list[int]], truncate: int) -> list[RenderedPrompt]:
    """Returns the prompts as text; of prompts in tokens, only the part that can be used. Raises InvalidRequest."""
    most = service.limits.max_input_tokens
    longest = max((len(prompt) for prompt in prompts if not isinstance(prompt, str)), default=0)
    if not truncate and longest > most:
        raise ContextOverflow.of_prompt(longest, most)
    rendered = []
    for prompt in prompts:
        if isinstance(prompt, str):
            rendered.append(RenderedPrompt(prompt))
        else:
            ids = prompt[-(truncate or most) :]
            rendered.append(RenderedPrompt(service.text.tokenizer.decode(ids), token_ids=ids))
    return rendered


async def _whole(generation: RequestGeneration, plan: CompletionPlan) -> Response:
    service, streams = generation.service, await generation.collect(plan.sequences)
    usage = plan.usage(streams, plan.prompt_tokens, generation)
    text = await service.text.threads.handle_text(plan.echoed, lambda: _body(service, plan, streams, usage))
    return generation.respond(text, characters=plan.characters, streams=streams)


def _body(
    service: Service, plan: CompletionPlan, streams: Sequence[TokenStream[CollectedTokens]], usage: Usage
) -> bytes:
    """Returns the response as JSON. Takes time in proportion to its length."""
    tokenizer, attempts, logprobs = service.text.tokenizer, plan.attempts, plan.logprobs is not None
    shown: list[int] = []
    for first in range(0, len(streams), attempts):
        likeliest = sorted(range(first, first + attempts), key=lambda each: -streams[each].output.mean_logprob())
        shown += likeliest[: plan.choices] if attempts > plan.choices else range(first, first + attempts)
    choices = []
    for index, each in enumerate(shown):
        stream, text = streams[each], plan.echo(each)
        entries = _logprobs(plan.entries(tokenizer, each), stream, text, answer=plan.generates) if logprobs else None
        text += stream.output.text if plan.generates else ""
        reason = stream.finish_reason if plan.generates else FinishReason.LENGTH
        choice = _choice(index, text, entries, reason)
        if plan.request.return_token_ids:
            choice.token_ids = stream.output.token_ids if plan.generates else []
            choice.prompt_token_ids = plan.sequences[each].input_ids
        choices.append(choice)
    completion = CompletionFinal(
        object="text_completion",
        choices=choices,
        usage=usage,
        **envelope("cmpl", service.model, plan.sequences[0].options.adapter_id),
    )
    return to_json(completion)


def _logprobs(
    entries: LogprobEntries, stream: TokenStream[CollectedTokens], echo: str, *, answer: bool
) -> CompletionLogprobs:
    """Returns the log-probabilities of the prompt's tokens, where they were requested, and of the answer's."""
    output = stream.output
    if stream.prefill is not None:
        entries.prompt(stream.prefill, echo)
    if answer:
        tops = output.top_tokens or [pb.TopTokens()] * len(output.texts)
        for token in zip(output.token_ids, output.texts, output.logprobs, tops, strict=True):
            entries.token(*token)
    return entries.take()


def _stream(generation: RequestGeneration, plan: CompletionPlan) -> Response:
    service, request = generation.service, plan.request
    outbox = Outbox()
    chunk = Chunk(
        object="text_completion",
        choices=[],
        **envelope("cmpl", service.model, plan.sequences[0].options.adapter_id),
    )
    whole_usage = request.stream_options is not None and request.stream_options.include_usage
    streams: list[AnyStream] = []

    def last_words() -> bytes:
        chunk.choices, chunk.usage = [], plan.usage(streams, plan.prompt_tokens, generation)
        return event(chunk) if whole_usage else b""

    end = generation.stream_end(outbox, sequences=len(plan.sequences), last_words=last_words, trailer=DONE)
    logprobs = plan.logprobs is not None
    for index, sequence in enumerate(plan.sequences):
        entries = plan.entries(service.text.tokenizer, index) if logprobs else None
        chunks = _CompletionChunks(outbox, chunk, plan, index, entries)
        streams.append(generation.begin(sequence, chunks, end))
    return generation.stream(outbox, characters=plan.characters)


class _CompletionChunks:
    """Writes a chunk for each token with text. An echoed prompt is one chunk, the first.

    As in TGI, the last chunk has the sequence's usage, unless the request asks for the usage of all sequences after the
    last one.
    """

    __slots__ = ("_chunk", "_entries", "_index", "_members", "_outbox", "_plan", "_prompt_ids", "_token_ids", "_told")

    def __init__(
        self,
        outbox: Outbox,
        chunk: Chunk,
        plan: CompletionPlan,
        index: int,
        entries: LogprobEntries | None,
    ) -> None:
        """entries: None if no log-probabilities were requested."""
        self._outbox = outbox
        self._chunk = chunk
        self._plan = plan
        self._index = index
        self._entries = entries
        self._told = False
        self._members = MemberReader() if wants_members(plan.request) else None
        ids = plan.request.return_token_ids
        self._token_ids: list[int] | None = [] if ids else None
        self._prompt_ids: list[int] | UnsetType = plan.sequences[index].input_ids if ids else UNSET

    def token(self, stream: AnyStream) -> None:
        self._tell_prompt(stream)
        if self._entries is not None and self._plan.generates:
            self._entries.token(stream.token_id, stream.text, stream.logprob, stream.top)
        if self._token_ids is not None and self._plan.generates:
            self._token_ids.append(stream.token_id)
        if stream.visible or stream.finish_reason is not None:
            self._write(stream, stream.visible, stream.finish_reason)

    def rest(self, stream: AnyStream, text: str) -> None:
        self._tell_prompt(stream)
        self._write(stream, text, stream.finish_reason)

    def _tell_prompt(self, stream: AnyStream) -> None:
        if self._told:
            return
        self._told = True
        if echo := self._plan.echo(self._index):
            if self._entries is not None and stream.prefill is not None:
                self._entries.prompt(stream.prefill, echo)
            self._send(stream, echo, None)

    def _write(self, stream: AnyStream, text: str, reason: FinishReason | None) -> None:
        if self._plan.generates:
            members = self._members.read(text) if self._members is not None else []
            self._send(stream, text, None if members else reason)
            for place, member in enumerate(members, 1):
                self._send(stream, "", reason if place == len(members) else None, CompletedMember.of(member))
        elif reason is not None:
            self._send(stream, "", FinishReason.LENGTH)

    def _send(
        self,
        stream: AnyStream,
        text: str,
        reason: FinishReason | None,
        member: CompletedMember | UnsetType = UNSET,
    ) -> None:
        options = self._plan.request.stream_options
        usage: Usage | UnsetType | None = UNSET
        if options is not None and options.include_usage and not options.continuous_usage_stats:
            usage = None
        elif reason is not None or (options is not None and options.include_usage):
            usage = self._plan.usage([stream], stream.input_length)
        logprobs = None if self._entries is None else self._entries.take()
        choice = _choice(self._index, text, logprobs, reason)
        choice.member = member
        if self._token_ids is not None:
            choice.token_ids, choice.prompt_token_ids = self._token_ids, self._prompt_ids
            self._token_ids, self._prompt_ids = [], UNSET
        self._chunk.choices, self._chunk.usage = [choice], usage
        self._outbox.write(event(self._chunk))


def _choice(
    index: int, text: str, logprobs: CompletionLogprobs | None, reason: FinishReason | None
) -> CompletionComplete:
    name = None if reason is None else finish_reason(reason)
    return CompletionComplete(index=index, text=text, logprobs=logprobs, finish_reason=name)
