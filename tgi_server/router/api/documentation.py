"""The OpenAPI document, and a page that shows it.

It is an OpenAPI 3.0 document like TGI's, and has all of TGI's schemas, even if no route uses them.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from swagger_ui_bundle import swagger_ui_path

from tgi_server.router.api.encoding import EVENTS, JSON, LINES
from tgi_server.router.schemas import (
    adapters,
    chat,
    compatibility,
    completions,
    context_management,
    decisions,
    encoding,
    explain,
    generate,
    info,
    messages,
    ollama,
    openai,
    responses,
    tokenize,
    warm,
)
from tgi_server.router.schemas.base import ErrorResponse, ResponseModel
from tgi_server.router.schemas.openai import OpenAIErrorResponse

Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    401: "The API key is missing or wrong",
    413: "The request is too large",
    422: "The request is invalid",
    424: "The shards failed while generating",
    429: "Too many requests are in flight",
    500: "The generation ended before the last token",
}


def described(description: str, model: type[ResponseModel], media_type: str = JSON) -> dict[str, Any]:
    """Returns the description of a response."""
    return {"description": description, "content": {media_type: {"schema": _reference(model.__name__)}}}


def answered_by(
    model: type[ResponseModel] | str | None,
    events: type[ResponseModel] | str | None = None,
    lines: type[ResponseModel] | str | None = None,
) -> Responses:
    """Describes a response in one piece, a stream of `events`, and a stream of `lines`. A str names one of `_NAMED`."""
    kinds = {JSON: model, EVENTS: events, LINES: lines}
    names = {kind: each if isinstance(each, str) else each.__name__ for kind, each in kinds.items() if each is not None}
    content = {kind: {"schema": _reference(name)} for kind, name in names.items()}
    return {200: {"description": "Success", "content": content}}


class DescribedRoute(Route):
    """A route that the OpenAPI document describes.

    body: schema of its requests, for the description only: the endpoint reads the body itself. respond: the endpoint.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        summary: str,
        responses: Responses,
        *,
        method: str = "GET",
        body: type[BaseModel] | None = None,
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.respond = endpoint
        self.method = method.lower()
        self.operation: dict[str, Any] = {
            "tags": ["Text generation"],
            "summary": summary,
            "operationId": re.sub(r"\W+", "_", f"{self.method}{self.path_format}").rstrip("_"),
            "parameters": [_path_parameter(name) for name in self.param_convertors],
            "responses": {str(status): response for status, response in responses.items()},
        }
        if body is not None:
            content = {"schema": _reference(body.__name__), **_example(body.__name__)}
            self.operation["requestBody"] = {"required": True, "content": {JSON: content}}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _example(name: str) -> dict[str, Any]:
    return {"example": _EXAMPLES[name]} if name in _EXAMPLES else {}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _errors(model: type[ResponseModel], media_type: str = JSON) -> Responses:
    return {status: described(description, model, media_type) for status, description in _ERRORS.items()}


GENERATION_ERRORS = _errors(ErrorResponse)
OPENAI_ERRORS = {400 if status == 422 else status: entry for status, entry in _errors(OpenAIErrorResponse).items()}
ANTHROPIC_ERRORS = {
    400 if status == 422 else status: entry for status, entry in _errors(messages.AnthropicErrorResponse).items()
}
OLLAMA_ERRORS = {400 if status == 422 else status: entry for status, entry in _errors(ollama.OllamaError).items()}
REQUEST_ERRORS: Responses = {status: GENERATION_ERRORS[status] for status in (401, 413, 422, 429)}
STREAM_ERRORS: Responses = _errors(ErrorResponse, EVENTS)
PLAIN_TEXT: Responses = {200: {"description": "Success", "content": {"text/plain": {"schema": {"type": "string"}}}}}

_CHAT = [{"role": "user", "content": "How do I cook rice?"}]
_EXAMPLES: dict[str, Any] = {
    "GenerateRequest": {"inputs": "How do I cook rice?", "parameters": {"max_new_tokens": 40}},
    "CompatGenerateRequest": {"inputs": "How do I cook rice?", "parameters": {"max_new_tokens": 40}},
    "ChatRequest": {"messages": _CHAT, "max_tokens": 40},
    "CompletionRequest": {"prompt": "How do I cook rice?", "max_tokens": 40},
    "MessagesRequest": {"messages": _CHAT, "max_tokens": 40},
    "CountTokensRequest": {"messages": _CHAT},
    "OllamaChatRequest": {"messages": _CHAT, "stream": False, "options": {"num_predict": 40}},
    "OllamaGenerateRequest": {"prompt": "How do I cook rice?", "stream": False, "options": {"num_predict": 40}},
    "OllamaEmbedRequest": {"input": ["How do I cook rice?"]},
    "OllamaEmbeddingsRequest": {"prompt": "How do I cook rice?"},
    "ResponsesRequest": {"input": "How do I cook rice?", "max_output_tokens": 40},
    "DecisionsRequest": {
        "input": "How do I cook rice?",
        "questions": [{"type": "predicate", "instructions": "Is this about cooking?"}],
    },
    "WarmRequest": {"messages": _CHAT, "ttl_seconds": 60},
    "EmbeddingsRequest": {"input": ["How do I cook rice?"]},
    "EmbedRequest": {"inputs": "How do I cook rice?"},
    "AnyRankRequest": {"query": "cooking rice", "texts": ["Rinse the rice.", "Sand the board."]},
    "PredictRequest": {"inputs": "I like rice."},
    "RerankRequest": {"query": "cooking rice", "documents": ["Rinse the rice.", "Sand the board."]},
    "AnyTokenizeRequest": {"inputs": "How do I cook rice?"},
    "DetokenizeRequest": {"tokens": [7, 8, 9]},
}
_ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}

_NULL = {"type": "null"}

_REQUESTS: list[type[BaseModel]] = [
    generate.GenerateRequest,
    generate.CompatGenerateRequest,
    *(tokenize.AnyTokenizeRequest, tokenize.DetokenizeRequest),
    chat.ChatRequest,
    chat.MessageBody,
    completions.CompletionRequest,
    *(responses.ResponsesRequest, responses.InputTokensRequest),
    messages.MessagesRequest,
    messages.CountTokensRequest,
    *(ollama.OllamaChatRequest, ollama.OllamaGenerateRequest),
    *(ollama.OllamaEmbedRequest, ollama.OllamaEmbeddingsRequest, ollama.OllamaShowRequest, ollama.OllamaPullRequest),
    compatibility.SagemakerRequest,
    compatibility.VertexRequest,
    decisions.DecisionsRequest,
    *(encoding.EmbeddingsRequest, encoding.EmbedRequest, encoding.AnyRankRequest, encoding.PredictRequest),
    explain.ExplainRequest,
    warm.ForgetRequest,
    warm.WarmRequest,
    adapters.LoadAdapterBody,
    adapters.UnloadAdapterBody,
]
_MESSAGE_EVENTS: tuple[type[ResponseModel], ...] = (
    *(messages.MessageStart, messages.BlockStart, messages.BlockPiece),
    *(messages.BlockStop, messages.MessageChange, messages.MessageStop, messages.Ping),
)
_RESPONSES: list[type[ResponseModel]] = [
    *(generate.GenerateResponse, generate.StreamResponse, generate.SimpleToken),
    *(tokenize.TokenizedPrompt, tokenize.DetokenizeResponse, tokenize.TokenizerInfo),
    *(chat.ChatCompletion, chat.ChatCompletionChunk, chat.TextMessage, chat.ToolCallMessage, chat.ChatTokenizeResponse),
    *(chat.TextDelta, chat.ToolCallDelta, chat.ReasoningDelta),
    *(completions.Chunk, completions.CompletionFinal, compatibility.VertexResponse),
    *(responses.ResponseObject, responses.ResponseEvent, responses.DeletedResponse),
    *(responses.OutputMessageItem, responses.OutputReasoning, responses.OutputFunctionCall),
    *(responses.OutputFreeFormCall, responses.OutputShellCall, responses.CountedInput, responses.InputItemList),
    *(messages.SentMessage, messages.SentText, messages.SentThinking, messages.SentToolUse, messages.CountedTokens),
    *_MESSAGE_EVENTS,
    *(context_management.ClearedThinking, context_management.ClearedToolUses),
    messages.AnthropicErrorResponse,
    *(ollama.OllamaChatResponse, ollama.OllamaGenerateResponse, ollama.OllamaError, ollama.OllamaStatus),
    *(ollama.OllamaEmbedResponse, ollama.OllamaEmbeddingsResponse, ollama.OllamaShowResponse),
    *(ollama.OllamaModels, ollama.OllamaVersion),
    *(decisions.Decision, decisions.PredicateAnswer, decisions.ChoiceAnswer, decisions.ScoreAnswer),
    decisions.RefusalAnswer,
    *(encoding.EmbeddingsResponse, encoding.Rank, encoding.Prediction, encoding.RerankResponse),
    explain.ExplainResponse,
    warm.ForgetResponse,
    warm.WarmResponse,
    *(info.Info, info.ModelsInfo, info.ModelInfo, info.AnthropicModels, info.AnthropicModel, info.VersionInfo),
    info.SleepInfo,
    *(openai.OpenAIErrorResponse, ErrorResponse),
]


def _any_of(*models: type[ResponseModel]) -> dict[str, Any]:
    return {"anyOf": [_reference(model.__name__) for model in models]}


_GENERATED = {"type": "array", "items": _reference("GenerateResponse")}
_PREDICTED = {"type": "array", "items": _reference("Prediction")}
# Schemas that are not objects, by the names of TGI's schemas.
_NAMED: dict[str, Any] = {
    "AnyRanks": {"anyOf": [_reference("Ranks"), _reference("RerankResponse")]},
    "AnyTokenizeResponse": {"anyOf": [_reference("TokenizeResponse"), _reference("TokenizedPrompt")]},
    "ChatCompletionDelta": _any_of(chat.TextDelta, chat.ToolCallDelta, chat.ReasoningDelta),
    "Completion": _any_of(completions.Chunk, completions.CompletionFinal),
    "Embeddings": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    "GeneratedList": _GENERATED,
    "MessageEvent": _any_of(*_MESSAGE_EVENTS),
    "Model": _any_of(info.ModelInfo, info.AnthropicModel),
    "ModelList": _any_of(info.ModelsInfo, info.AnthropicModels),
    "OutputMessage": _any_of(chat.TextMessage, chat.ToolCallMessage),
    "Predictions": {
        "anyOf": [_PREDICTED, {"type": "array", "items": _PREDICTED}],
    },
    "Ranks": {"type": "array", "items": _reference("Rank")},
    "SagemakerResponse": {
        "anyOf": [
            _GENERATED,
            *_any_of(generate.GenerateResponse, chat.ChatCompletion, completions.CompletionFinal)["anyOf"],
        ]
    },
    "SagemakerStreamResponse": _any_of(generate.StreamResponse, chat.ChatCompletionChunk, completions.Chunk),
    "TokenizeResponse": {"type": "array", "items": _reference("SimpleToken")},
}

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Oatmill API</title><link rel="stylesheet" href="docs/swagger-ui.css"></head>
<body><div id="swagger-ui"></div><script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script></body>
</html>
"""
_SCRIPT = """SwaggerUIBundle({
  url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, tryItOutEnabled: true, validatorUrl: null,
})
"""
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


def document_routes(routes: Iterable[BaseRoute], version: str) -> list[Route]:
    """Returns the routes of /docs (Swagger UI, with its files) and of the document, also at TGI's path."""
    making: asyncio.Future[bytes] | None = None

    async def document(_: Request) -> Response:
        nonlocal making
        if making is None:  # in a thread, as it takes up to a second
            making = asyncio.ensure_future(
                asyncio.to_thread(lambda: bytes(JSONResponse(describe(routes, version)).body))
            )
        return Response(await asyncio.shield(making), media_type=JSON)

    async def page(_: Request) -> Response:
        return HTMLResponse(_PAGE, headers=PAGE_HEADERS)

    async def asset(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        if name == "start.js":
            return Response(_SCRIPT, media_type="text/javascript")
        return FileResponse(swagger_ui_path / name, media_type=_ASSETS[name])

    assets = [Route(f"/docs/{name}", asset) for name in ("start.js", *_ASSETS)]
    return [Route("/openapi.json", document), Route("/api-doc/openapi.json", document), Route("/docs", page), *assets]


def describe(routes: Iterable[BaseRoute], version: str) -> dict[str, Any]:
    """Returns the OpenAPI document of an application with these routes. version: the server's version."""
    paths: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for route in routes:
        if isinstance(route, DescribedRoute):
            paths[route.path_format][route.method] = route.operation
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "Oatmill text generation",
            "description": "A text-generation server with TGI's interface.",
            "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
            "version": version,
        },
        "paths": paths,
        "components": {"schemas": _as_3_0(_definitions())},
    }


def _definitions() -> dict[str, Any]:
    """Returns the schemas of all requests and responses, by name."""
    _, requests = models_json_schema(
        [(model, "validation") for model in _REQUESTS], ref_template="#/components/schemas/{model}"
    )
    _, responses = msgspec.json.schema_components(_RESPONSES, ref_template="#/components/schemas/{name}")
    return {**responses, **_NAMED, **requests["$defs"]}


def _as_3_0(node: Any) -> Any:
    """Converts JSON Schema to OpenAPI 3.0: `nullable` for null, `enum` for `const`, flags for exclusive bounds."""
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
