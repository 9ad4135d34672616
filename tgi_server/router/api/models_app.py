"""The application of a server of several models: each request goes to the application of the model that it names."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tgi_server.router.api.access import AccessRules
from tgi_server.router.api.admission import RECEIVED, SMALL, read_body, read_json
from tgi_server.router.api.app import middleware, service_app
from tgi_server.router.api.connections import WATCH
from tgi_server.router.api.encoding import error_response
from tgi_server.router.api.generation import TimeLimits
from tgi_server.router.api.request_record import RequestRecord, request_id
from tgi_server.router.errors import ClientGone, InvalidTemplate, NoSuchModel, RouterError, Unhealthy
from tgi_server.router.models import HostedModel, Models
from tgi_server.router.service import Service
from tgi_server.router.text.chat_template import NO_TEMPLATE

_HEALTH = frozenset({"/health", "/ping"})
# The task of the routes of models that embed or rank, by path.
_TASKS = {
    **dict.fromkeys(("/v1/embeddings", "/embed", "/api/embed", "/api/embeddings"), "embed"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/predict"), "rank"),
}
# Routes that need a chat template, whatever the body. (With /api/chat, models are loaded by an empty one.)
_CHATS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/decisions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/chat_tokenize",
    }
)
_KINDS = {"embed": "an embedding model", "rank": "a rerank model"}
_TAG = ":latest"
_CHOSEN = "chosen_model"  # the key of the model in the state of a request


def create_models_app(models: Models, rules: AccessRules, payload_limit: int) -> ASGIApp:
    """Returns the application. rules: who may call it. payload_limit: bytes of a body, of whichever model."""
    app: ASGIApp = _Dispatcher(models, payload_limit)
    for each in reversed(middleware(rules, models.models[0].metrics)):
        app = each.cls(app, *each.args, **each.kwargs)
    return app


class _Dispatcher:
    """Chooses a model by `?model=`, else by `model` in the body, else the first one that has the route."""

    def __init__(self, models: Models, payload_limit: int) -> None:
        self._models = models
        self._payload_limit = payload_limit
        self._apps: dict[HostedModel, tuple[Service, ASGIApp]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, arrived = Request(scope, receive), perf_counter()
        try:
            app = self._app(*await self._chosen(request))
        except RouterError as error:
            self._record(request, error, arrived)
            app = error_response(error, request.url.path, request.headers)
            app.headers["x-request-id"] = request_id(request)
        await app(scope, receive, send)

    def _app(self, model: HostedModel, service: Service) -> ASGIApp:
        """Returns the application of a model; there is a new one after each start of its shards."""
        if model not in self._apps or self._apps[model][0] is not service:
            self._apps[model] = service, service_app(service)
        return self._apps[model][1]

    async def _chosen(self, request: Request) -> tuple[HostedModel, Service]:
        """Returns the model that a request is for, once it is loaded. Reads the body. Raises RouterError."""
        path, named = request.scope["path"], _queried(request)
        if request.method == "POST":
            content = await self._received(request)
            named = named or self._named(content)
        elif named is None:
            return self._any(well=path in _HEALTH)
        model = request.scope["state"][_CHOSEN] = self._model(path, named)
        if model.service is None and path in _CHATS and not model.chats:
            raise InvalidTemplate(NO_TEMPLATE)  # as the route does, but the model need not be loaded for it
        return model, model.service or await self._loaded(request, model)

    async def _loaded(self, request: Request, model: HostedModel) -> Service:
        """Returns the service of a model once it is loaded. Raises ClientGone if the client leaves before."""
        loading, left = asyncio.ensure_future(self._models.loaded(model, _deadline(request))), False

        def leave() -> None:
            nonlocal left
            left = loading.cancel()

        watch = request.scope["state"][WATCH]
        watch(leave)
        try:
            return await loading
        except asyncio.CancelledError:
            if left:
                raise ClientGone("the client disconnected") from None
            raise
        finally:
            watch(None)

    async def _received(self, request: Request) -> Any:
        """Returns the body as JSON, and leaves both for the route. A body that is not JSON is the route's business."""
        body = await read_body(request, self._payload_limit)
        try:
            content = read_json(body) if len(body) < SMALL else await asyncio.to_thread(read_json, body)
        except RouterError as error:
            content = error
        request.scope["state"][RECEIVED] = body, content
        return content

    def _named(self, content: Any) -> str | None:
        """Returns the name of a model in a body: `model`, or an `adapter_id` of TGI's that is the name of a model.

        The latter is taken out: the model has no adapter of that name.
        """
        if not isinstance(content, dict):
            return None
        if isinstance(given := content.get("model"), str) and given:
            return given
        for place in (content, content.get("parameters")):
            if isinstance(place, dict) and isinstance(name := place.get("adapter_id"), str):
                if any(name in model.names for model in self._models.models):
                    del place["adapter_id"]
                    return name
                return name if self._models.find(name) is not None else None
        return None

    def _model(self, path: str, named: str | None) -> HostedModel:
        """Returns the model that a request names, or that its path is for. Raises NoSuchModel."""
        task, models = _TASKS.get(path), self._models.models
        able = [model for model in models if model.task == task]
        if named is None:
            return able[0] if able else models[0]
        found = self._models.find(named) or self._models.find(named.removesuffix(_TAG))
        if found is None:
            raise NoSuchModel(f"there is no model {named[:100]!r} here; there are {_names(models)}")
        if task is not None and found not in able:
            there = f"there are {_names(able)}" if able else "this server has none"
            raise NoSuchModel(f"{named[:100]!r} is not {_KINDS[task]}; {there}")
        return found

    def _any(self, *, well: bool) -> tuple[HostedModel, Service]:
        """Returns the model that answers a request for none. well: it has to be able to generate.

        Raises Unhealthy if none is loaded.
        """
        for model in self._models.models:
            if model.service is not None and not (well and model.state == "failed"):
                return model, model.service
        reasons = (f"{model.name}: {model.resident.reason or model.state}" for model in self._models.models)
        raise Unhealthy(f"no model can answer: {'; '.join(reasons)}")

    def _record(self, request: Request, error: RouterError, arrived: float) -> None:
        """Logs and counts a request that no model has received, for the model that it names."""
        service = next((model.service for model in self._models.models if model.service is not None), None)
        if request.method != "POST" or service is None:
            return
        chosen: HostedModel | None = request.scope["state"].get(_CHOSEN)
        if chosen is not None:
            service = replace(service, model=replace(service.model, names=chosen.names), metrics=chosen.metrics)
        record = RequestRecord(service, request)
        record.arrived = arrived
        record.end(error)


def _names(models: Iterable[HostedModel]) -> str:
    return ", ".join(repr(model.name) for model in models)


def _queried(request: Request) -> str | None:
    """Returns the model that the query of the address names."""
    found = parse_qs(request.scope.get("query_string", b"").decode("latin-1")).get("model")
    return found[0] if found else None


def _deadline(request: Request) -> float:
    """Returns the time after which the answer to the request is useless, by its headers and its body."""
    _, content = request.scope["state"].get(RECEIVED, (b"", None))
    places = (content, content.get("parameters"), content.get("options")) if isinstance(content, dict) else ()
    given = (place.get("timeout_ms") for place in places if isinstance(place, dict))
    limit = next((each for each in given if isinstance(each, int) and each > 0), 0)
    return min(TimeLimits.of(request.headers).deadlines(perf_counter(), limit, streams=False))
