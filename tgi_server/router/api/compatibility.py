"""`/`, which is /generate or /generate_stream as its body says."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tgi_server.router.api.documentation import GENERATION_ERRORS, described_body
from tgi_server.router.api.exchange import Exchange, answer
from tgi_server.router.api.generate import generate_whole, stream_generation
from tgi_server.router.api.route import DirectRoute
from tgi_server.router.schemas.generate import CompatGenerateRequest, GenerateResponse
from tgi_server.router.service import Service


def compatibility_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post(
        "/",
        summary="Generate text, in one piece or as server-sent events",
        response_model=list[GenerateResponse],
        responses=GENERATION_ERRORS,
        openapi_extra=described_body(CompatGenerateRequest),
    )
    async def compat_generate(request: Request) -> Response:
        async def handle(exchange: Exchange) -> Response:
            body = await exchange.read(CompatGenerateRequest)
            if body.stream:
                return await stream_generation(exchange, body)
            return await generate_whole(exchange, body, in_list=True)

        return await answer(service, request, handle)

    return router
