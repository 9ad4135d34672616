"""/health, /metrics, /info and /v1/models: the server's state, its models and their limits."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from time import time

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_server.router.api.documentation import PLAIN_TEXT, DescribedRoute, Responses, answered_by, described
from tgi_server.router.api.encoding import json_response, speaks_anthropic
from tgi_server.router.api.routes.page import page, wants_page
from tgi_server.router.errors import InvalidRequest, NoSuchModel
from tgi_server.router.metrics import CONTENT_TYPE
from tgi_server.router.schemas.base import ErrorResponse
from tgi_server.router.schemas.info import (
    AdapterInfo,
    AnthropicModel,
    AnthropicModels,
    EncoderInfo,
    Info,
    ModelInfo,
    ModelsInfo,
    VersionInfo,
)
from tgi_server.router.schemas.openai import OpenAIErrorResponse
from tgi_server.router.service import ListedModel, Service

# The release of TGI whose interface this server has.
TGI_VERSION = "3.3.6"

_HEALTH: Responses = {200: {"description": "Success"}, 503: described("The shards do not answer", ErrorResponse)}

_NO_SUCH_MODEL: Responses = {404: described("The server has another model", OpenAIErrorResponse)}
_LIMIT, _MOST = 20, 1000


def probe_routes(service: Service) -> list[Route]:
    async def health(_: Request) -> Response:
        await service.check_health()
        return Response()

    async def root(request: Request) -> Response:
        return page() if wants_page(request.headers) else await health(request)

    async def info(_: Request) -> Response:
        return json_response(_info(service))

    async def metrics(_: Request) -> Response:
        return Response(await service.metrics.exposed(), media_type=CONTENT_TYPE)

    async def version(_: Request) -> Response:
        return json_response(VersionInfo(version=service.model.version))

    created = int(time())

    def all_models() -> dict[str, ModelInfo]:
        return {model.id: model for each in service.listed() for model in _listed(each, created, service)}

    def in_anthropics_form(model: ModelInfo) -> AnthropicModel:
        limits = service.limits
        return AnthropicModel(
            id=model.id,
            display_name=model.id,
            created_at=datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            max_input_tokens=limits.max_input_tokens,
            max_tokens=limits.max_total_tokens - 1,
        )

    async def models(request: Request) -> Response:
        if speaks_anthropic(request.headers):
            return json_response(
                models_page(list(map(in_anthropics_form, all_models().values())), request.query_params)
            )
        return json_response(ModelsInfo(object="list", data=list(all_models().values())))

    async def one_model(request: Request) -> Response:
        model_id, known = request.path_params["model_id"], all_models()
        if model_id not in known:
            raise NoSuchModel(f"there is no model {model_id[:100]!r} here, only {', '.join(map(repr, known))}")
        found = known[model_id]
        return json_response(in_anthropics_form(found) if speaks_anthropic(request.headers) else found)

    all_summary = "The models, by all their names, and adapters; with `anthropic-version` as pages"
    one = answered_by("Model") | _NO_SUCH_MODEL
    return [
        *(DescribedRoute(path, health, "200 if the server can generate", _HEALTH) for path in ("/health", "/ping")),
        DescribedRoute("/", root, "200 if the server can generate", _HEALTH),
        DescribedRoute("/info", info, "What is served, and with which limits", answered_by(Info)),
        DescribedRoute("/metrics", metrics, "Metrics in Prometheus' text format", PLAIN_TEXT),
        DescribedRoute("/version", version, "The version of this server", answered_by(VersionInfo)),
        DescribedRoute("/v1/models", models, all_summary, answered_by("ModelList")),
        DescribedRoute("/v1/models/{model_id:path}", one_model, "One model, or adapter", one),
    ]


def _listed(listed: ListedModel, created: int, asked: Service) -> Iterator[ModelInfo]:
    """Yields a model by all its names, its adapters, and its encoders. asked: the service that got the request."""
    model, parents = listed.names[0], dict.fromkeys(listed.names)
    owner = model
    if (service := listed.service) is not None:
        owner, parents = service.model.model_id, parents if service.generates else {}
        parents |= {adapter.id: model for adapter in service.adapters}
        parents |= dict.fromkeys(each.name for each in service.encoders.by_task.values())
    for name, parent in parents.items():
        info = ModelInfo(id=name, object="model", created=created, owned_by=owner, parent=parent)
        if asked.models is not None:
            info.state = listed.state
            info.reason = listed.reason or UNSET
        yield info


def _info(service: Service) -> Info:
    limits = service.limits
    return Info(
        model_id=service.model.model_id,
        model_sha=service.model.revision,
        model_pipeline_tag=_pipeline(service),
        model_device_type=service.model.device,
        model_dtype=service.model.dtype,
        paged=service.model.paged,
        max_concurrent_requests=limits.max_concurrent_requests,
        max_best_of=limits.max_best_of,
        max_stop_sequences=limits.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        validation_workers=service.policy.validation_workers,
        max_client_batch_size=limits.max_client_batch_size,
        speculate=service.model.speculate,
        reads_images=service.text.images is not None,
        router="text-generation-router",
        version=_comparable(service.model.version),
        quantization=service.model.quantization,
        kv_cache_dtype=service.model.kv_cache_dtype,
        max_batch_total_tokens=limits.max_batch_total_tokens,
        linear_kernels=service.model.linear_kernels,
        forward_pass=service.model.forward_pass,
        fallbacks=list(service.model.fallbacks),
        encoders=[
            EncoderInfo(
                task="rank" if served.info.task == "rank" else "embed",
                model_id=served.name,
                dtype=served.info.dtype,
                max_tokens=served.info.max_tokens,
                columns=served.info.columns,
                pooling=served.info.pooling or None,
            )
            for listed in service.listed()
            if listed.service is not None
            for served in listed.service.encoders.by_task.values()
        ],
        adapters=[AdapterInfo(id=adapter.id, rank=adapter.rank, ready=adapter.ready) for adapter in service.adapters],
        models=UNSET if service.models is None else [each.names[0] for each in service.models() if each.generates],
    )


def _pipeline(service: Service) -> str:
    """Returns the hub's name of the model's task."""
    if service.generates:
        return "text2text-generation" if service.model.encoder_decoder else "text-generation"
    return "feature-extraction" if "embed" in service.encoders.by_task else "text-ranking"


def _comparable(version: str) -> str:
    """Returns a version that clients can compare with TGI's, such as 3.3.6+oatmill.0.1.0 (PEP 440, semver)."""
    return f"{TGI_VERSION}+oatmill.{version.replace('+', '.')}"


def models_page(models: Sequence[AnthropicModel], query: Mapping[str, str]) -> AnthropicModels:
    """Returns a page of at most `limit` models, after `after_id` or before `before_id`. Raises InvalidRequest."""
    limit = _limit(query.get("limit"))
    if (after := query.get("after_id")) is not None:
        models = models[_index(models, after, "after_id") + 1 :]
    before = query.get("before_id")
    if before is not None:
        models = models[: _index(models, before, "before_id")]
    page = models[-limit:] if before is not None else models[:limit]
    return AnthropicModels(
        data=list(page),
        has_more=len(page) < len(models),
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


def _limit(text: str | None) -> int:
    if text is None:
        return _LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= _MOST):
        raise InvalidRequest.at("limit", f"is {text[:20]!r}; it must be 1 to {_MOST}")
    return int(text)


def _index(models: Sequence[AnthropicModel], name: str, parameter: str) -> int:
    found = next((index for index, model in enumerate(models) if model.id == name), None)
    if found is None:
        raise InvalidRequest.at(parameter, f"is {name[:100]!r}, which is not a model of this server")
    return found
