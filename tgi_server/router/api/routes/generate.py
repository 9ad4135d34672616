"""/generate and /generate_stream."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.routing import Route

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason, GenerationOptions
from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import (
    GENERATION_ERRORS,
    STREAM_ERRORS,
)
from tgi_server.router.api.encoding import known_logprob, tgi_event, to_json, top_tokens
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.generation import RequestGeneration
from tgi_server.router.api.routes.prompt_images import markdown_prompt
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.generate import (
    BestOfSequence,
    Details,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
    PrefillToken,
    StreamDetails,
    StreamResponse,
    Token,
)
from tgi_server.router.service import Service
from tgi_server.router.submission import PreparedRequest
from tgi_server.router.text.grammar import requested_grammar
from tgi_server.router.text.token_stream import AnyStream, CollectedTokens, TokenStream
from tgi_server.router.text.tokenizer import TextTokenizer


def generate_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, GENERATION_ERRORS)
    routes.receive("/generate", "Generate text", GenerateRequest, generate_whole, GenerateResponse)
    summary = "Generate text, token by token, as server-sent events"
    routes.receive("/generate_stream", summary, GenerateRequest, stream_generation, None, StreamResponse, STREAM_ERRORS)
    return routes


async def prepare_tgi(
    admission: Admission,
    inputs: str,
    parameters: GenerateParameters,
    cache_salt: str | None = None,
    *,
    streams: bool = False,
) -> PreparedRequest:
    """Prepares a request for the scheduler. cache_salt: overrides the one in `parameters`. Raises InvalidRequest."""
    service, size = admission.service, admission.size

    def read() -> GenerationOptions:
        options = admission.options(parameters, Dialect.TGI, streams=streams)
        grammar = requested_grammar(parameters.grammar, "parameters.grammar")
        salt = cache_salt or options.cache_salt
        if grammar is None and salt == options.cache_salt:
            return options
        return replace(options, grammar=grammar, cache_salt=salt)

    options = await service.text.threads.handle_text(size, read)
    prompt = await markdown_prompt(admission, inputs, "inputs", options.cache_salt)
    return await service.preparer.prepare(prompt, options, Dialect.TGI, client=admission.owner, size=size)


def with_logprobs(prepared: PreparedRequest, *, logprobs: bool) -> PreparedRequest:
    """Returns the request with the report of log-probabilities turned on or off."""
    if prepared.options.report.logprobs == logprobs:
        return prepared
    report = replace(prepared.options.report, logprobs=logprobs)
    return replace(prepared, options=replace(prepared.options, report=report))


async def generate_whole(admission: Admission, request: GenerateRequest, *, in_list: bool = False) -> Response:
    """Responds in one piece. in_list: True responds with a list of one object, as `/` does."""
    prepared = await prepare_tgi(admission, request.inputs, request.parameters, request.cache_salt)
    details = request.parameters.details or prepared.options.report.prefill_logprobs
    best_of = prepared.options.best_of or 1
    admission.reserve(best_of - 1)
    requests = with_logprobs(prepared, logprobs=details or best_of > 1).times(best_of)
    generation = RequestGeneration(admission)
    streams = await generation.collect(requests)
    tokens = sum(map(_reported_tokens, streams)) if details else 0
    parts = admission.service.text
    best, text = await parts.threads.handle_text(
        tokens, lambda: _body(parts.tokenizer, request, requests, streams, details=details, in_list=in_list)
    )
    return generation.respond(text, characters=len(request.inputs), streams=[best])


def _reported_tokens(stream: AnyStream) -> int:
    """Returns the number of a sequence's tokens in `details`."""
    return stream.generated_tokens + (len(stream.prefill.ids) if stream.prefill is not None else 0)


def _body(
    tokenizer: TextTokenizer,
    request: GenerateRequest,
    requests: Sequence[PreparedRequest],
    streams: Sequence[TokenStream[CollectedTokens]],
    *,
    details: bool,
    in_list: bool,
) -> tuple[TokenStream[CollectedTokens], bytes]:
    """Returns the best sequence, and the response as JSON."""
    order = sorted(range(len(streams)), key=lambda each: streams[each].output.mean_logprob(), reverse=True)
    prompt = request.inputs if request.parameters.return_full_text else ""
    best = streams[order[0]]
    response = GenerateResponse(generated_text=prompt + best.output.text)
    if details:
        response.details = Details(**_details(tokenizer, best, requests[order[0]].seed))
        others = [
            BestOfSequence(
                generated_text=prompt + streams[each].output.text,
                **_details(tokenizer, streams[each], requests[each].seed),
            )
            for each in order[1:]
        ]
        if others:
            response.details.best_of_sequences = others
    return best, to_json([response] if in_list else response)


def _details(tokenizer: TextTokenizer, stream: TokenStream[CollectedTokens], seed: int | None) -> dict[str, Any]:
    """Returns the members of `details` for a sequence."""
    output = stream.output
    special = [token_id in tokenizer.special_tokens for token_id in output.token_ids]
    special[-1] |= _ends_text(stream, output.visible[-1])
    tokens = [
        Token(id=token_id, text=_told(stream, text, visible), logprob=known_logprob(logprob), special=hidden)
        for token_id, text, visible, logprob, hidden in zip(
            output.token_ids, output.texts, output.visible, output.logprobs, special, strict=True
        )
    ]
    return {
        "finish_reason": stream.finish_reason,
        "generated_tokens": stream.generated_tokens,
        "seed": seed,
        "prefill": _prefill(tokenizer, stream.prefill),
        "tokens": tokens,
        "top_tokens": [top_tokens(tokenizer, top) for top in output.top_tokens] or UNSET,
    }


def _told(stream: AnyStream, text: str, visible: str) -> str:
    """Returns the text to report for a token. The last one ends with the stop sequence, as the whole text does."""
    return visible if visible and stream.finish_reason is FinishReason.STOP_SEQUENCE else text


def _ends_text(stream: AnyStream, visible: str) -> bool:
    """Returns True if the last token ends the text and is not part of it. It is reported to clients as special."""
    return stream.finish_reason in (FinishReason.EOS_TOKEN, FinishReason.DEADLINE) and not visible


def _prefill(tokenizer: TextTokenizer, prefill: pb.PrefillTokens | None) -> list[PrefillToken]:
    if prefill is None:
        return []
    return [
        PrefillToken(id=token_id, text=tokenizer.token_text(token_id), logprob=known_logprob(logprob))
        for token_id, logprob in zip(prefill.ids, prefill.logprobs, strict=True)
    ]


async def stream_generation(admission: Admission, request: GenerateRequest) -> Response:
    """Responds with an event for each token."""
    parameters = request.parameters
    prepared = await prepare_tgi(admission, request.inputs, parameters, request.cache_salt, streams=True)
    outbox = Outbox()
    repeated = request.inputs if parameters.return_full_text else ""
    events = _TokenEvents(
        outbox, admission.service.text.tokenizer, seed=prepared.seed, details=parameters.details, prompt=repeated
    )
    generation = RequestGeneration(admission)
    generation.begin(with_logprobs(prepared, logprobs=True), events, generation.stream_end(outbox))
    return generation.stream(outbox, characters=len(request.inputs))


class _TokenEvents:
    """Writes TGI's events: one for each token, the last with the whole text."""

    __slots__ = ("_details", "_outbox", "_seed", "_texts", "_tokenizer")

    def __init__(
        self, outbox: Outbox, tokenizer: TextTokenizer, *, seed: int | None, details: bool, prompt: str
    ) -> None:
        """prompt: text before the generated text in the last event. details: True adds details to the last event."""
        self._outbox = outbox
        self._tokenizer = tokenizer
        self._seed = seed
        self._details = details
        self._texts = [prompt]

    def token(self, stream: AnyStream) -> None:
        visible = stream.visible
        token = Token(
            id=stream.token_id,
            text=_told(stream, stream.text, visible),
            logprob=known_logprob(stream.logprob),
            special=stream.token_id in self._tokenizer.special_tokens or _ends_text(stream, visible),
            drafted=stream.drafted or UNSET,
        )
        self._write(stream, token, UNSET if stream.top is None else top_tokens(self._tokenizer, stream.top), visible)

    def rest(self, stream: AnyStream, text: str) -> None:
        self._write(stream, Token(id=stream.token_id, text=text, logprob=None, special=False), UNSET, text)

    def _write(self, stream: AnyStream, token: Token, top: list[Token] | UnsetType, visible: str) -> None:
        self._texts.append(visible)
        whole, details = None, None
        if stream.finish_reason is not None:
            whole = "".join(self._texts)
            details = self._stream_details(stream, stream.finish_reason) if self._details else None
        response = StreamResponse(
            index=stream.generated_tokens, token=token, top_tokens=top, generated_text=whole, details=details
        )
        self._outbox.write(tgi_event(response))

    def _stream_details(self, stream: AnyStream, reason: FinishReason) -> StreamDetails:
        return StreamDetails(
            finish_reason=reason,
            generated_tokens=stream.generated_tokens,
            seed=self._seed,
            input_length=stream.input_length,
        )
