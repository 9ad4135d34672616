"""/v1/load_lora_adapter and /v1/unload_lora_adapter: load and unload adapters while the server runs."""

import asyncio
import logging
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tgi_server.gguf.paths import GgufError, adapter_file
from tgi_server.router.api.admission import Admission, respond_to
from tgi_server.router.api.documentation import OPENAI_ERRORS, PLAIN_TEXT, DescribedRoute, Responses, described
from tgi_server.router.errors import Forbidden, InvalidRequest
from tgi_server.router.schemas.adapters import LoadAdapterBody, UnloadAdapterBody
from tgi_server.router.schemas.openai import OpenAIErrorResponse
from tgi_server.router.service import Service

logger = logging.getLogger(__name__)

_RESPONSES: Responses = {
    **PLAIN_TEXT,
    **{status: OPENAI_ERRORS[status] for status in (400, 401, 413)},
    403: described("Adapters cannot be updated on this server", OpenAIErrorResponse),
    404: described("There is no such adapter", OpenAIErrorResponse),
    503: described("The shards do not answer", OpenAIErrorResponse),
}


def adapter_routes(service: Service) -> list[Route]:
    async def load(request: Request) -> Response:
        _root(service)
        return await respond_to(service, request, LoadAdapterBody, _load)

    async def unload(request: Request) -> Response:
        _root(service)
        return await respond_to(service, request, UnloadAdapterBody, _unload)

    route = partial(DescribedRoute, responses=_RESPONSES, method="POST")
    return [
        route("/v1/load_lora_adapter", load, "Load an adapter", body=LoadAdapterBody),
        route("/v1/unload_lora_adapter", unload, "Unload an adapter", body=UnloadAdapterBody),
    ]


async def _load(admission: Admission, asked: LoadAdapterBody) -> Response:
    service, root = admission.service, _root(admission.service)
    if service.model.is_named(asked.lora_name):
        raise InvalidRequest.at("lora_name", "is a name of the model itself; choose another")
    place = await asyncio.to_thread(_place_below, root, asked.lora_path)
    adapter = await service.adapters.add(asked.lora_name, str(place))
    logger.info("the adapter %s is loaded from %s; its rank is %d", adapter.id, place, adapter.rank)
    return _succeeded(admission, f"LoRA adapter '{adapter.id}' added")


async def _unload(admission: Admission, asked: UnloadAdapterBody) -> Response:
    await admission.service.adapters.remove(asked.lora_name)
    logger.info("the adapter %s is unloaded", asked.lora_name)
    return _succeeded(admission, f"LoRA adapter '{asked.lora_name}' removed")


def _succeeded(admission: Admission, done: str) -> Response:
    return PlainTextResponse(f"Success: {done} successfully.", headers=admission.record.headers)


def _root(service: Service) -> Path:
    """Returns the folder that adapters may be loaded from. Raises Forbidden if adapters cannot be loaded."""
    if service.policy.adapter_root is None:
        raise Forbidden("adapters stay as they are: this server was started without --allow-adapter-updates")
    return service.policy.adapter_root


def _place_below(root: Path, path: str) -> Path:
    """Returns the adapter's folder, or its GGUF file.

    Raises the same InvalidRequest for a path that does not exist and for one outside `root`, which reveals nothing.
    """
    try:
        place, top = (root / path).resolve(), root.resolve()
        if place.is_relative_to(top):
            file = adapter_file(place)
            place = place if file is None else file.resolve()
            if place.is_relative_to(top) and (place if file else place / "adapter_config.json").is_file():
                return place
    except GgufError as error:
        raise InvalidRequest(f"`lora_path`: {error}", param="lora_path") from error
    except (OSError, ValueError):
        pass
    raise InvalidRequest.at(
        "lora_path", "is not the folder or the GGUF file of an adapter below the folder that --adapter-root names"
    )
