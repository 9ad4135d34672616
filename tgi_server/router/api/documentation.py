"""The OpenAPI document, and a page to read it by.

It is an OpenAPI 3.0 document, as TGI's is, and names TGI's schemas, also those that no route refers to.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from swagger_ui_bundle import swagger_ui_path

from tgi_server.router.api.responses import EVENTS, JSON
from tgi_server.router.schemas import adapters, chat, compatibility, completions, generate, openai, responses
from tgi_server.router.schemas.base import ErrorResponse
from tgi_server.router.schemas.info import ModelInfo
from tgi_server.router.schemas.openai import OpenAIErrorResponse

Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    401: "The API key is missing or wrong",
    413: "The request is too large",
    422: "The request breaks a rule",
    424: "The shards failed while generating",
    429: "Too many requests are in flight",
    500: "The generation ended before the last token",
}


def _errors(model: type[BaseModel]) -> Responses:
    return {status: {"description": description, "model": model} for status, description in _ERRORS.items()}


GENERATION_ERRORS = _errors(ErrorResponse)
OPENAI_ERRORS = {400 if status == 422 else status: entry for status, entry in _errors(OpenAIErrorResponse).items()}
REQUEST_ERRORS: Responses = {status: GENERATION_ERRORS[status] for status in (401, 413, 422, 429)}
STREAM_ERRORS: Responses = {
    status: {**entry, "content": {EVENTS: {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}}
    for status, entry in GENERATION_ERRORS.items()
}


def described_body(model: type[BaseModel]) -> dict[str, Any]:
    """Describes a request body that the endpoint reads itself."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": reference}}}}


def event_stream_of(model: type[BaseModel]) -> Responses:
    """Describes a response whose events are `model`."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {200: {"description": "Generated text", "content": {EVENTS: {"schema": reference}}}}


_VERSION = "3.0.3"
_ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}

_NULL = {"type": "null"}

_REQUESTS: list[type[BaseModel]] = [
    generate.GenerateRequest,
    generate.CompatGenerateRequest,
    generate.TokenizeRequest,
    generate.DetokenizeRequest,
    chat.ChatRequest,
    chat.MessageBody,
    completions.CompletionRequest,
    responses.ResponsesRequest,
    compatibility.SagemakerRequest,
    compatibility.VertexRequest,
    adapters.LoadAdapterBody,
    adapters.UnloadAdapterBody,
]
_RESPONSES: list[type[BaseModel]] = [
    generate.StreamResponse,
    chat.ChatCompletionChunk,
    completions.Chunk,
    completions.Completion,
    compatibility.SagemakerStreamResponse,
    responses.ResponseObject,
    openai.OpenAIErrorResponse,
    ErrorResponse,
    ModelInfo,
]

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Oatmill API</title><link rel="stylesheet" href="docs/swagger-ui.css"></head>
<body><div id="swagger-ui"></div><script src="docs/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true})</script></body>
</html>
"""


def document_routes(app: FastAPI) -> APIRouter:
    """/docs (Swagger UI, served from here) and the document itself, also where TGI has it."""
    router = APIRouter(include_in_schema=False)
    making: asyncio.Future[bytes] | None = None

    @router.get("/openapi.json")
    @router.get("/api-doc/openapi.json")
    async def document() -> Response:
        nonlocal making
        if making is None:  # it takes up to a second
            making = asyncio.ensure_future(asyncio.to_thread(lambda: bytes(JSONResponse(app.openapi()).body)))
        return Response(await asyncio.shield(making), media_type=JSON)

    @router.get("/docs")
    async def page() -> Response:
        return HTMLResponse(_PAGE)

    for name, media_type in _ASSETS.items():
        router.add_api_route(f"/docs/{name}", _asset(name, media_type), methods=["GET"])
    return router


def _asset(name: str, media_type: str) -> Any:
    async def serve() -> Response:
        return FileResponse(swagger_ui_path / name, media_type=media_type)

    return serve


def describe(app: FastAPI) -> dict[str, Any]:
    """Returns the OpenAPI document of `app`; it is made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            license_info={"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(_definitions() | schemas)
        app.openapi_schema = _as_3_0(document) | {"openapi": _VERSION}
    return app.openapi_schema


def _definitions() -> dict[str, Any]:
    """Returns schemas of what endpoints read and write themselves."""
    _, requests = models_json_schema(
        [(model, "validation") for model in _REQUESTS], ref_template="#/components/schemas/{model}"
    )
    _, responses = models_json_schema(
        [(model, "serialization") for model in _RESPONSES], ref_template="#/components/schemas/{model}"
    )
    return {**responses["$defs"], **requests["$defs"]}


def _as_3_0(node: Any) -> Any:
    """Returns JSON Schema as OpenAPI 3.0 has it: `nullable` for null, `enum` for `const`, flags for bounds."""
    if isinstance(node, list):
        return [_as_3_0(each) for each in node]
    if not isinstance(node, dict):
        return node
    node = {key: _as_3_0(value) for key, value in _nullable(node).items()}
    if "const" in node:
        node["enum"] = [node.pop("const")]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in node and not isinstance(node[exclusive], bool):
            node[bound], node[exclusive] = node[exclusive], True
    return node


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") == "null":
        return {**schema, "type": "string", "nullable": True, "enum": [None]}
    choices = schema.get("anyOf")
    if not isinstance(choices, list) or _NULL not in choices:
        return schema
    rest = [choice for choice in choices if choice != _NULL]
    outer = {key: value for key, value in schema.items() if key != "anyOf"} | {"nullable": True}
    if len(rest) > 1:
        return outer | {"anyOf": rest}
    return outer | {"allOf": rest} if "$ref" in rest[0] else {**rest[0], **outer}
