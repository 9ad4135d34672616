"""The ASGI application: all routes, error responses and access control."""

import asyncio
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tgi_server.loading import read_progress
from tgi_server.router.api.access import AccessRules, ApiKeyMiddleware, ForeignPageMiddleware
from tgi_server.router.api.documentation import DescribedRoute, document_routes
from tgi_server.router.api.encoding import error_response
from tgi_server.router.api.request_record import request_id
from tgi_server.router.api.routes.adapters import adapter_routes
from tgi_server.router.api.routes.chat import chat_routes
from tgi_server.router.api.routes.compatibility import compatibility_routes
from tgi_server.router.api.routes.completions import completion_routes
from tgi_server.router.api.routes.decisions import decision_routes
from tgi_server.router.api.routes.embeddings import embedding_routes
from tgi_server.router.api.routes.explain import explain_routes
from tgi_server.router.api.routes.generate import generate_routes
from tgi_server.router.api.routes.info import probe_routes
from tgi_server.router.api.routes.messages import message_routes
from tgi_server.router.api.routes.ollama import ollama_routes
from tgi_server.router.api.routes.ollama_models import ollama_model_routes
from tgi_server.router.api.routes.page import page_routes, page_while_loading
from tgi_server.router.api.routes.ranking import ranking_routes
from tgi_server.router.api.routes.responses import response_routes
from tgi_server.router.api.routes.sleep import sleep_routes
from tgi_server.router.api.routes.tokenize import tokenize_routes
from tgi_server.router.api.routes.warm import warm_routes
from tgi_server.router.errors import NoSuchRoute, RouterError, Unhealthy
from tgi_server.router.metrics import CONTENT_TYPE, Metrics
from tgi_server.router.service import Service

_LOADING_RETRY_SECONDS = "5"

# Routes of text-generation models, the busiest first: routes are tried in this order.
_ROUTES = (
    generate_routes,
    chat_routes,
    completion_routes,
    response_routes,
    message_routes,
    ollama_routes,
    decision_routes,
    warm_routes,
    explain_routes,
    compatibility_routes,
    adapter_routes,
)
_OTHER_ROUTES = (embedding_routes, ranking_routes, tokenize_routes, ollama_model_routes, probe_routes, sleep_routes)


def create_app(service: Service, rules: AccessRules) -> Starlette:
    """Returns the application of a server with one model."""
    return service_app(service, middleware(rules, service.metrics))


def service_app(service: Service, before: Sequence[Middleware] = ()) -> Starlette:
    """Returns the application with the routes of a service. before: middleware that requests pass first."""
    groups = (*(_ROUTES if service.generates else ()), *_OTHER_ROUTES)
    routes = [route for group in groups for route in group(service)]
    app = Starlette(
        routes=[*routes, *document_routes(routes, service.model.version), *page_routes()],
        middleware=[*before, Middleware(_PostRoutes, routes=routes)],
        exception_handlers={RouterError: _respond_with_error, HTTPException: _respond_with_http_error},
    )
    app.state.generates = service.generates
    return app


class _PostRoutes:
    """Responds to POST requests of routes without parameters, which it finds by path in a dictionary.

    Other requests go to Starlette's router, which tries one route after the other inside two layers of exception
    handlers.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        posts = [each for each in routes if isinstance(each, DescribedRoute) and each.methods == {"POST"}]
        self._endpoints = {each.path: each.respond for each in reversed(posts) if not each.param_convertors}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._endpoints.get(scope["path"]) if scope.get("method") == "POST" else None
        if respond is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await respond(request)
        except RouterError as error:
            response = await _respond_with_error(request, error)
        await response(scope, receive, send)


class ReplaceableApp:
    """An application that can be replaced by another one while it is served."""

    def __init__(self, first: ASGIApp) -> None:
        self.current = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.current(scope, receive, send)


def loading_app(first_socket: Path) -> ASGIApp:
    """Returns an application that answers every request with 503 and the progress of loading.

    Browsers get a page that shows the progress, also with status 503, and the files of the page.

    first_socket: the socket on which the first shard will listen.
    """

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        response = page_while_loading(scope["method"], scope["path"], headers)
        if response is None:
            percent, stage = await asyncio.to_thread(read_progress, first_socket)
            response = error_response(Unhealthy(f"Loading model, {percent} %: {stage}"), scope["path"], headers)
        if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            response.headers["retry-after"] = _LOADING_RETRY_SECONDS
        await response(scope, receive, send)

    return refuse


def metrics_app(metrics: Metrics, rules: AccessRules) -> ASGIApp:
    """Returns the application of the port for metrics."""

    async def expose(_: Request) -> Response:
        return Response(await metrics.exposed(), media_type=CONTENT_TYPE)

    return Starlette(routes=[Route("/metrics", expose), Route("/", expose)], middleware=middleware(rules, metrics))


def middleware(rules: AccessRules, metrics: Metrics) -> list[Middleware]:
    """Returns the middleware for access control."""
    found: list[Middleware] = []
    if rules.origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(rules.origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
            )
        )
    found.append(
        Middleware(ApiKeyMiddleware if rules.keys else ForeignPageMiddleware, rules=rules, refused=metrics.refused)
    )
    return found


async def _respond_with_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    response = error_response(error, request.url.path, request.headers)
    response.headers["x-request-id"] = request_id(request)
    return response


async def _respond_with_http_error(request: Request, error: Exception) -> Response:
    """Responds to a request for an unknown path or method."""
    assert isinstance(error, HTTPException)
    allowed = _allowed_methods(request) if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED else ()
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        alone = "" if request.app.state.generates else "; without --model-id no route generates text"
        message += f"; /docs lists the routes{alone}"
    return error_response(NoSuchRoute(message, error.status_code, allowed), request.url.path, request.headers)


def _allowed_methods(request: Request) -> list[str]:
    """Returns the methods that routes support for the request's path."""
    routes = request.app.routes
    scopes = {method: {**request.scope, "method": method} for method in ("DELETE", "GET", "HEAD", "POST")}
    return [
        method for method, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)
    ]
