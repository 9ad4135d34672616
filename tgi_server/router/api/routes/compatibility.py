"""Other services' routes: `/` (Hugging Face endpoints), /invocations (SageMaker), /vertex (Vertex AI)."""

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tgi_server.router.api.documentation import GENERATION_ERRORS, endpoint
from tgi_server.router.api.exchange import DirectRoute, Exchange, respond_to
from tgi_server.router.api.routes.chat import answer_chat
from tgi_server.router.api.routes.chat_prompt import ChatPlan, plan_chat, prompt_for_chat
from tgi_server.router.api.routes.completions import complete
from tgi_server.router.api.routes.generate import generate_whole, stream_generation, tgi_options
from tgi_server.router.api.routes.prompt_images import markdown_prompt
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.compatibility import (
    GenerateVertexInstance,
    SagemakerRequest,
    VertexRequest,
    VertexResponse,
)
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.generate import (
    CompatGenerateRequest,
    GenerateParameters,
    StreamResponse,
)
from tgi_server.router.service import Service
from tgi_server.router.text.preparation import PreparedRequest


def compatibility_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post(
        "/",
        summary="Generate text, in one piece or as server-sent events",
        **endpoint(GENERATION_ERRORS, CompatGenerateRequest, "GeneratedList", StreamResponse),
    )
    async def compat_generate(request: Request) -> Response:
        return await respond_to(service, request, CompatGenerateRequest, _generate)

    @router.post(
        "/invocations",
        summary="Generate text as SageMaker asks for it",
        **endpoint(GENERATION_ERRORS, SagemakerRequest, "SagemakerResponse", "SagemakerStreamResponse"),
    )
    async def invocations(request: Request) -> Response:
        return await respond_to(service, request, SagemakerRequest, _invoke)

    @router.post(
        "/vertex",
        summary="Generate texts as Vertex AI asks for them",
        **endpoint(GENERATION_ERRORS, VertexRequest, VertexResponse),
    )
    async def vertex(request: Request) -> Response:
        return await respond_to(service, request, VertexRequest, _predict)

    return router


async def _generate(exchange: Exchange, request: CompatGenerateRequest) -> Response:
    if request.stream:
        return await stream_generation(exchange, request)
    return await generate_whole(exchange, request, in_list=True)


async def _invoke(exchange: Exchange, body: SagemakerRequest) -> Response:
    match body.root:
        case CompatGenerateRequest() as request:
            return await _generate(exchange, request)
        case ChatRequest() as request:
            return await answer_chat(exchange, request)
        case CompletionRequest() as request:
            return await complete(exchange, request)


async def _predict(exchange: Exchange, request: VertexRequest) -> Response:
    instances = request.instances
    exchange.reserve(len(instances) - 1)
    sequences: list[PreparedRequest] = []
    characters = 0
    for instance in instances:
        text, checked = await _checked(exchange, instance.root)
        report = replace(checked.options.report, logprobs=False)
        sequences.append(replace(checked, options=replace(checked.options, report=report, include_stop=True)))
        characters += len(text)
    streams = await exchange.collect(sequences)
    response = VertexResponse(predictions=[stream.output.text for stream in streams])
    return exchange.respond(response, characters=characters, streams=streams)


async def _checked(exchange: Exchange, instance: GenerateVertexInstance | ChatRequest) -> tuple[str, PreparedRequest]:
    service = exchange.service
    if isinstance(instance, ChatRequest):

        def plan() -> ChatPlan:
            planned = plan_chat(service, instance)
            if planned.use.tools or planned.options.n > 1:
                raise InvalidRequest("a prediction is one text: it has no calls of `tools`, and `n` is 1")
            return planned

        prompt = await prompt_for_chat(exchange, plan)
        return prompt.text, prompt.checked
    options = await tgi_options(service, instance.parameters or GenerateParameters(), exchange.size)
    rendered = await markdown_prompt(service, exchange.request, instance.inputs, "inputs", options.cache_salt)
    checked = await service.preparer.prepare(rendered, options, Dialect.TGI, client=exchange.owner, size=exchange.size)
    return instance.inputs, checked
