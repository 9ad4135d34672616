"""/tokenize and /chat_tokenize."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from tokenizers import Encoding

from tgi_server.router.api.answers import json_answer
from tgi_server.router.api.body import parse, read_body
from tgi_server.router.api.chat_request import plan_chat, render_plan
from tgi_server.router.api.documentation import REQUEST_ERRORS, described_body
from tgi_server.router.api.route import DirectRoute
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.chat import ChatRequest, ChatTokenizeResponse
from tgi_server.router.schemas.generate import GenerateRequest
from tgi_server.router.schemas.tokenize import TokenizeResponse
from tgi_server.router.service import Service
from tgi_server.router.token_json import quoted


def tokenize_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post(
        "/tokenize",
        summary="The tokens of a prompt",
        response_model=TokenizeResponse,
        responses=REQUEST_ERRORS,
        openapi_extra=described_body(GenerateRequest),
    )
    async def tokenize(request: Request) -> Response:
        body = parse(GenerateRequest, await read_body(request, service.payload_limit))
        if not body.inputs:
            raise InvalidRequest("`inputs` must not be empty")
        encoding = await service.threads.encode(body.inputs, add_special_tokens=True)
        return json_answer(await _tokens(service, encoding, body.inputs))

    @router.post(
        "/chat_tokenize",
        summary="The prompt that a conversation becomes, and its tokens",
        response_model=ChatTokenizeResponse,
        responses=REQUEST_ERRORS,
        openapi_extra=described_body(ChatRequest),
    )
    async def chat_tokenize(request: Request) -> Response:
        body = parse(ChatRequest, await read_body(request, service.payload_limit))
        plan = plan_chat(service, body)
        prompt = await render_plan(service, plan)
        encoding = await service.threads.encode(prompt.text, add_special_tokens=False)
        text, encoding = await service.threads.handle_text(len(prompt.text), lambda: prompt.checked(encoding))
        tokens = await _tokens(service, encoding, text)
        return json_answer(f'{{"tokenize_response":{tokens},"templated_text":{quoted(text)}}}')

    return router


async def _tokens(service: Service, encoding: Encoding, text: str) -> str:
    return await service.threads.handle_text(len(text), lambda: _json(encoding, text))


def _json(encoding: Encoding, text: str) -> str:
    entries = (
        f'{{"id":{token_id},"text":{quoted(text[start:stop])},"start":{start},"stop":{stop}}}'
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
    )
    return f"[{','.join(entries)}]"
