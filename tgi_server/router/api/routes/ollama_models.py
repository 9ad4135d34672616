"""Ollama's routes that list and describe models, and those for embeddings."""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import OLLAMA_ERRORS, DescribedRoute, answered_by
from tgi_server.router.api.encoding import LINES, json_response, line
from tgi_server.router.api.routes.embeddings import dimensions_of, rows_of, tokens_of
from tgi_server.router.api.routes.ollama import nanoseconds, timestamp
from tgi_server.router.api.routes.ollama_request import without_tag
from tgi_server.router.api.values import encode, respond_with_values, served_encoder
from tgi_server.router.errors import NoSuchModel, NotSupported
from tgi_server.router.schemas.ollama import (
    OllamaDetails,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    OllamaModel,
    OllamaModels,
    OllamaPullRequest,
    OllamaShowRequest,
    OllamaShowResponse,
    OllamaStatus,
    OllamaVersion,
)
from tgi_server.router.service import Service
from tgi_server.router.text.encoder import Fitting, ServedEncoder

# The release of Ollama whose interface this server has.
OLLAMA_VERSION = "0.32.0"
# Time at which the model is unloaded: in some centuries, as Ollama reports it for models that stay.
_NEVER = "2300-01-01T00:00:00Z"
_REFUSED = ("/api/create", "/api/copy", "/api/delete", "/api/push", "/api/blobs/{digest}")


def ollama_model_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, OLLAMA_ERRORS)
    started = timestamp()

    async def tags(_: Request) -> Response:
        return json_response(OllamaModels(models=list(_all_models(service, started))))

    async def loaded(_: Request) -> Response:
        awake = (each.service for each in service.listed() if each.state == "awake" and each.service is not None)
        return json_response(OllamaModels(models=[model for each in awake for model in _in_memory(each, started)]))

    async def version(_: Request) -> Response:
        return json_response(OllamaVersion(version=f"{OLLAMA_VERSION}+oatmill.{service.model.version}"))

    async def show(admission: Admission, request: OllamaShowRequest) -> Response:
        name = without_tag(service, request.model)
        model = next((each for each in _models(service, started) if each.name == name), None)
        if model is None:
            raise NoSuchModel(f"model {request.model[:100]!r} not found; {_known(service)}")
        return json_response(_shown(service, model), admission.record.headers)

    async def refuse(_: Request) -> Response:
        raise NotSupported(f"models are not created, copied, deleted or uploaded here; {_known(service)}")

    summary = "Embeddings of texts, as Ollama has them"
    routes.receive("/api/embed", summary, OllamaEmbedRequest, _embed, OllamaEmbedResponse)
    summary = "The embedding of a text, as older clients of Ollama want it"
    routes.receive("/api/embeddings", summary, OllamaEmbeddingsRequest, _embed_one, OllamaEmbeddingsResponse)
    routes.receive("/api/show", "What a model is, and can do", OllamaShowRequest, show, OllamaShowResponse)
    summary = "Success for a model that is served; others are not fetched"
    routes.receive("/api/pull", summary, OllamaPullRequest, _pull, OllamaStatus, lines=OllamaStatus)
    return [
        *routes,
        DescribedRoute("/api/tags", tags, "The models, as Ollama lists them", answered_by(OllamaModels)),
        DescribedRoute("/api/ps", loaded, "The models in memory, as Ollama lists them", answered_by(OllamaModels)),
        DescribedRoute("/api/version", version, "The release of Ollama's interface", answered_by(OllamaVersion)),
        *(Route(path, refuse, methods=["GET", "POST", "DELETE"]) for path in _REFUSED),
    ]


def _in_memory(service: Service, started: str) -> Iterator[OllamaModel]:
    """Yields a model that is awake, its adapters in memory, and its encoders."""
    ready = {service.model.names[0], *(adapter.id for adapter in service.adapters if adapter.ready)}
    ready |= {encoder.name for encoder in service.encoders.by_task.values()}
    for model in _models(service, started):
        if model.name in ready:
            yield structs.replace(
                model,
                expires_at=_NEVER,
                size_vram=0 if service.model.device == "cpu" else model.size,
                context_length=model.details.context_length,
            )


def _all_models(service: Service, started: str) -> Iterator[OllamaModel]:
    """Yields all models of the server; models that have not been loaded have only names."""
    for each in service.listed():
        if each.service is not None:
            yield from _models(each.service, started)
        else:
            yield from (_described(name, name, [], _details("", "", 0), 0, started) for name in each.names)


def _known(service: Service) -> str:
    """Returns the rest of an error message: which models the server has."""
    names = ", ".join(repr(model.name) for model in _all_models(service, ""))
    return f"this server has {names}, which it was started with"


def _models(service: Service, started: str) -> Iterator[OllamaModel]:
    """Yields a service's model by all its names, its adapters and its encoders. started: the server's start time."""
    model = service.model
    if service.generates:
        capabilities = _capabilities(service)
        details = _details(model.model_type, model.quantization or model.dtype, service.limits.max_total_tokens)
        model_id = f"{model.model_id}@{model.revision or ''}"
        for name in model.names:
            yield _described(name, model_id, capabilities, details, model.weight_bytes, started)
        adapted = structs.replace(details, parent_model=model.names[0])
        for adapter in service.adapters:
            adapted_id = f"{model_id}+{adapter.id}"
            yield _described(adapter.id, adapted_id, capabilities, adapted, model.weight_bytes, started)
    for encoder in service.encoders.by_task.values():
        info = encoder.info
        details = _details(info.model_type, info.dtype, info.max_tokens)
        if info.task == "embed":
            details.embedding_length = info.columns
        capabilities = ["embedding"] if info.task == "embed" else []
        yield _described(encoder.name, info.model_id, capabilities, details, info.weight_bytes, started)


def _described(
    name: str, model_id: str, capabilities: list[str], details: OllamaDetails, size: int, started: str
) -> OllamaModel:
    digest = sha256(model_id.encode()).hexdigest()
    return OllamaModel(
        name=name,
        model=name,
        modified_at=started,
        size=size,
        digest=digest,
        details=details,
        capabilities=capabilities,
    )


def _capabilities(service: Service) -> list[str]:
    can = {
        "completion": True,
        "tools": bool(service.text.template.source),
        "thinking": service.text.answer_form.thoughts(None) is not None,
        "vision": service.text.images is not None,
    }
    return [name for name, able in can.items() if able]


def _details(model_type: str, weights: str, context: int) -> OllamaDetails:
    return OllamaDetails(
        parent_model="",
        format="",
        family=model_type,
        families=[model_type],
        parameter_size="",
        quantization_level=weights,
        context_length=context,
    )


def _shown(service: Service, model: OllamaModel) -> OllamaShowResponse:
    details, family = model.details, model.details.family
    info = {"general.architecture": family, f"{family}.context_length": details.context_length}
    if details.embedding_length:
        info[f"{family}.embedding_length"] = details.embedding_length
    return OllamaShowResponse(
        modified_at=model.modified_at,
        template=service.text.template.source if "completion" in model.capabilities else "",
        details=details,
        model_info=info,
        capabilities=model.capabilities,
    )


async def _pull(admission: Admission, request: OllamaPullRequest) -> Response:
    service = admission.service
    if not service.is_served(without_tag(service, request.model) or ""):
        raise NoSuchModel(f"model {request.model[:100]!r} cannot be pulled: {_known(service)}")
    done, headers = OllamaStatus(status="success"), admission.record.headers
    return Response(line(done), media_type=LINES, headers=headers) if request.stream else json_response(done, headers)


async def _embed(admission: Admission, request: OllamaEmbedRequest) -> Response:
    encoder = _encoder(admission, request)
    texts = request.input if isinstance(request.input, list) else [request.input] if request.input else []
    dimensions = dimensions_of(encoder, request.dimensions)
    inputs = []
    if texts:
        inputs = await tokens_of(encoder, texts, Fitting("input", cut=request.truncate), encoder.prompt(None))
    values = await encode(admission, encoder, inputs, dimensions=dimensions, normalize=True)
    record = admission.record

    def response() -> OllamaEmbedResponse:
        rows: list[Any] = list(rows_of(values))
        return OllamaEmbedResponse(
            model=encoder.name,
            embeddings=rows,
            total_duration=nanoseconds(record.total_time),
            prompt_eval_count=record.read_tokens,
        )

    return await respond_with_values(admission, response, size=values.size)


async def _embed_one(admission: Admission, request: OllamaEmbeddingsRequest) -> Response:
    encoder = _encoder(admission, request)
    inputs = []
    if request.prompt:
        inputs = await tokens_of(encoder, [request.prompt], Fitting("prompt"), encoder.prompt(None))
    values = await encode(admission, encoder, inputs, normalize=False)

    def response() -> OllamaEmbeddingsResponse:
        rows: list[Any] = list(rows_of(values))
        return OllamaEmbeddingsResponse(embedding=rows[0] if rows else [])

    return await respond_with_values(admission, response, size=values.size)


def _encoder(admission: Admission, request: OllamaEmbedRequest | OllamaEmbeddingsRequest) -> ServedEncoder:
    return served_encoder(admission, "embed", without_tag(admission.service, request.model))
