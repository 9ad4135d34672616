"""/v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.router.api.documentation import OPENAI_ERRORS, described_body, event_stream_of
from tgi_server.router.api.requests import DirectRoute, Exchange, answer, collect, timing_headers
from tgi_server.router.api.responses import json_answer, quoted
from tgi_server.router.api.routes.chat_prompt import ChatPlan, ChatPrompt, plan_chat, prompt_for_text, prompt_with_tools
from tgi_server.router.api.routes.chat_stream import ChatStream, logprob_entry, tool_call_id
from tgi_server.router.api.routes.openai import Envelope, finish_reason, usage_json
from tgi_server.router.schemas.chat import ChatCompletion, ChatCompletionChunk, ChatRequest
from tgi_server.router.service import Service
from tgi_server.router.text.token_stream import CollectingSink
from tgi_server.router.text.tokenizer import TextTokenizer
from tgi_server.router.text.tools import NO_TOOL, read_tool_call


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation, in one piece or as server-sent events",
        response_model=ChatCompletion,
        responses=OPENAI_ERRORS | event_stream_of(ChatCompletionChunk),
        openapi_extra=described_body(ChatRequest),
    )
    async def chat_completions(request: Request) -> Response:
        async def handle(exchange: Exchange) -> Response:
            return await answer_chat(exchange, await exchange.read(ChatRequest))

        return await answer(service, request, handle)

    return router


async def answer_chat(exchange: Exchange, request: ChatRequest) -> Response:
    plan = plan_chat(exchange.service, request, exchange.size)
    exchange.reserve(plan.choices - 1)
    if request.stream:
        return await ChatStream(exchange, plan).open()
    return await _whole(exchange, plan)


async def _whole(exchange: Exchange, plan: ChatPlan) -> Response:
    service = exchange.service
    if plan.tools:
        prompt, answers = await _call_tools(exchange, plan)
    else:
        prompt = await prompt_for_text(service, plan.request, plan.size)
        answers = await _say(exchange, plan, prompt, plan.choices)
    sinks = [each.sink for each in answers]
    choices = ",".join(
        f'{{"index":{index},"message":{each.message},"logprobs":{each.logprobs},"finish_reason":"{each.reason}"}}'
        for index, each in enumerate(answers)
    )
    envelope = Envelope("chat.completion", "chatcmpl", service.model)
    text = envelope.wrap(choices, usage_json(len(prompt.checked.input_ids), sinks))
    return json_answer(text, timing_headers(exchange, characters=len(prompt.text), sinks=sinks))


@dataclass(frozen=True, slots=True)
class _Answer:
    """One choice: the sequence, and JSON of what is told of it."""

    sink: CollectingSink
    message: str
    logprobs: str
    reason: str


async def _say(exchange: Exchange, plan: ChatPlan, prompt: ChatPrompt, choices: int) -> list[_Answer]:
    requests = prompt.checked.times(choices)
    sinks = await collect(exchange, requests, reveal_stop=False, logprobs=plan.logprobs)
    return [_said(exchange.service.tokenizer, sink, plan) for sink in sinks]


def _said(tokenizer: TextTokenizer, sink: CollectingSink, plan: ChatPlan) -> _Answer:
    assert sink.finish_reason is not None
    logprobs = "null"
    if plan.logprobs:
        tops: Sequence[pb.TopTokens | None] = sink.top_tokens or [None] * len(sink.texts)
        entries = [
            logprob_entry(tokenizer, text, logprob, top)
            for text, logprob, top in zip(sink.texts, sink.logprobs, tops, strict=True)
        ]
        logprobs = f'{{"content":[{",".join(entries)}]}}'
    message = f'{{"role":"assistant","content":{quoted(sink.text)}}}'
    return _Answer(sink, message, logprobs, finish_reason(sink.finish_reason))


async def _call_tools(exchange: Exchange, plan: ChatPlan) -> tuple[ChatPrompt, list[_Answer]]:
    """Answers that decided to call no tool are generated again, in words."""
    service = exchange.service
    prompt = await prompt_with_tools(service, plan)
    requests = prompt.checked.times(plan.choices)
    sinks = await collect(exchange, requests, reveal_stop=False, logprobs=False)
    calls = [_called(sink) for sink in sinks]
    undecided = calls.count(None)
    if not undecided:
        return prompt, [call for call in calls if call is not None]
    for sink, call in zip(sinks, calls, strict=True):
        if call is None:
            exchange.cancel(sink)
    prompt = await prompt_for_text(service, plan.request, plan.size)
    said = iter(await _say(exchange, plan, prompt, undecided))
    return prompt, [call or next(said) for call in calls]


def _called(sink: CollectingSink) -> _Answer | None:
    """The call that the sequence is; None for `no_tool`."""
    name, arguments = read_tool_call(sink.text)
    if name == NO_TOOL:
        return None
    call = (
        f'{{"id":"{tool_call_id()}","type":"function",'
        f'"function":{{"name":{quoted(name)},"arguments":{quoted(arguments)}}}}}'
    )
    message = f'{{"role":"assistant","content":null,"tool_calls":[{call}]}}'
    cut = sink.finish_reason is FinishReason.LENGTH
    return _Answer(sink, message, "null", "length" if cut else "tool_calls")
