"""/generate and /generate_stream."""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.router.api.documentation import GENERATION_ERRORS, STREAM_ERRORS, described_body, event_stream_of
from tgi_server.router.api.event_stream import EventStream, Outbox, StreamEnd, event
from tgi_server.router.api.requests import DirectRoute, Exchange, answer, collect, stream_headers, timing_headers
from tgi_server.router.api.responses import json_answer, number, optional, quoted, token_json, top_tokens_json
from tgi_server.router.schemas.generate import GenerateRequest, GenerateResponse, StreamResponse
from tgi_server.router.service import Service
from tgi_server.router.text.detokenizer import StopSequences
from tgi_server.router.text.token_stream import CollectingSink, OnEnd, SequenceSink
from tgi_server.router.text.tokenizer import TextTokenizer


def generate_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post(
        "/generate",
        summary="Generate text",
        response_model=GenerateResponse,
        responses=GENERATION_ERRORS,
        openapi_extra=described_body(GenerateRequest),
    )
    async def generate(request: Request) -> Response:
        async def handle(exchange: Exchange) -> Response:
            return await generate_whole(exchange, await exchange.read(GenerateRequest))

        return await answer(service, request, handle)

    @router.post(
        "/generate_stream",
        summary="Generate text, token by token, as server-sent events",
        response_class=Response,
        responses=STREAM_ERRORS | event_stream_of(StreamResponse),
        openapi_extra=described_body(GenerateRequest),
    )
    async def generate_stream(request: Request) -> Response:
        async def handle(exchange: Exchange) -> Response:
            return await stream_generation(exchange, await exchange.read(GenerateRequest))

        return await answer(service, request, handle)

    return router


async def generate_whole(exchange: Exchange, request: GenerateRequest, *, in_list: bool = False) -> Response:
    """in_list: answer with a list of one, as `/` does."""
    parameters = request.chosen_parameters
    checked = await exchange.service.validator.check(request.inputs, parameters, size=exchange.size)
    details = parameters.details or parameters.decoder_input_details
    best_of = parameters.best_of or 1
    if best_of > 1:
        exchange.reserve(best_of - 1)
    requests = checked.times(best_of)
    sinks = await collect(exchange, requests, reveal_stop=True, logprobs=details or best_of > 1)
    order = sorted(range(best_of), key=lambda each: sinks[each].mean_logprob(), reverse=True)
    prompt = request.inputs if parameters.return_full_text else ""
    tokenizer = exchange.service.tokenizer
    best = sinks[order[0]]
    text = f'{{"generated_text":{quoted(prompt + best.text)}'
    if details:
        others = ",".join(
            f'{{"generated_text":{quoted(prompt + sinks[each].text)},'
            f"{_details(tokenizer, sinks[each], requests[each].seed)}}}"
            for each in order[1:]
        )
        sequences = f',"best_of_sequences":[{others}]' if best_of > 1 else ""
        text += f',"details":{{{_details(tokenizer, best, requests[order[0]].seed)}{sequences}}}'
    text += "}"
    headers = timing_headers(exchange, characters=len(request.inputs), sinks=[best])
    return json_answer(f"[{text}]" if in_list else text, headers)


def _details(tokenizer: TextTokenizer, sink: CollectingSink, seed: int | None) -> str:
    """The members of a JSON object that tell how a sequence came about."""
    assert sink.finish_reason is not None
    tokens = ",".join(
        token_json(token_id, text, logprob, special=special)
        for token_id, text, logprob, special in zip(
            sink.token_ids, sink.texts, sink.logprobs, sink.special, strict=True
        )
    )
    top = ",".join(top_tokens_json(tokenizer, each) for each in sink.top_tokens)
    return (
        f'"finish_reason":"{sink.finish_reason.value}","generated_tokens":{sink.generated_tokens},'
        f'"seed":{optional(seed)},"prefill":{_prefill(tokenizer, sink.prefill)},"tokens":[{tokens}]'
        + (f',"top_tokens":[{top}]' if top else "")
    )


def _prefill(tokenizer: TextTokenizer, prefill: pb.PrefillTokens | None) -> str:
    if prefill is None:
        return "[]"
    entries: Sequence[str] = [
        f'{{"id":{token_id},"text":{quoted(tokenizer.token_text(token_id))},"logprob":{number(logprob)}}}'
        for token_id, logprob in zip(prefill.ids, prefill.logprobs, strict=True)
    ]
    return f"[{','.join(entries)}]"


async def stream_generation(exchange: Exchange, request: GenerateRequest) -> EventStream:
    parameters = request.chosen_parameters
    check = exchange.service.validator.check
    checked = await check(request.inputs, parameters, streaming=True, size=exchange.size)
    outbox = Outbox()
    sink = _EventSink(
        exchange.service.tokenizer,
        checked.input_ids,
        checked.stop_sequences(reveal=True),
        StreamEnd(outbox, exchange.path, exchange.release),
        outbox=outbox,
        seed=checked.seed,
        details=parameters.details,
        prompt=request.inputs if parameters.return_full_text else "",
    )
    exchange.submit(checked, sink, logprobs=True)
    return EventStream(outbox, stream_headers(exchange, characters=len(request.inputs)), exchange.close)


class _EventSink(SequenceSink):
    """Writes TGI's events: one for each token, the last with the whole text."""

    __slots__ = ("_details", "_outbox", "_seed", "_texts")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        input_ids: list[int],
        stops: StopSequences | None,
        on_end: OnEnd,
        *,
        outbox: Outbox,
        seed: int | None,
        details: bool,
        prompt: str,
    ) -> None:
        super().__init__(tokenizer, input_ids, stops, on_end)
        self._outbox = outbox
        self._seed = seed
        self._details = details
        self._texts = [prompt]

    def _take(
        self, token_id: int, text: str, visible: str, logprob: float | None, top: pb.TopTokens | None, *, special: bool
    ) -> None:
        self._texts.append(visible)
        token = token_json(token_id, text, logprob, special=special)
        tops = f'"top_tokens":{top_tokens_json(self._tokenizer, top)},' if top is not None else ""
        whole, details = "null", "null"
        if self.finish_reason is not None:
            whole = quoted("".join(self._texts))
            details = self._stream_details(self.finish_reason) if self._details else details
        self._outbox.write(
            event(
                f'{{"index":{self.generated_tokens},"token":{token},{tops}"generated_text":{whole},"details":{details}}}'
            )
        )

    def _stream_details(self, reason: FinishReason) -> str:
        return (
            f'{{"finish_reason":"{reason.value}","generated_tokens":{self.generated_tokens},'
            f'"seed":{optional(self._seed)},"input_length":{self.input_length}}}'
        )
