"""Start-up of a server of several models: their services, and the connection to the launcher, which runs the shards."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from shared.settings import read_settings
from tgi_server.router.api.access import AccessRules
from tgi_server.router.api.models_app import create_models_app
from tgi_server.router.errors import StartupError
from tgi_server.router.model_metrics import SeveralMetrics
from tgi_server.router.models import HostedModel, Models
from tgi_server.router.residency import Resident
from tgi_server.router.service import Service
from tgi_server.router.settings import RouterSettings
from tgi_server.router.startup import IMAGES_PAYLOAD_LIMIT, Front, assembled, public_name, texts_of
from tgi_server.router.text.folder_texts import FolderTexts


class ReadOnce:
    """The text files of the models' folders, read one model at a time, once for all services of a model.

    They are read before the server is ready, because reading blocks the event loop (`read_texts`).
    """

    def __init__(self, settings: Mapping[HostedModel, RouterSettings]) -> None:
        """Starts reading. settings: settings of each model."""
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, "texts")
        self._reading = {model: self._begin(model) for model in settings}

    async def texts(self, model: HostedModel) -> FolderTexts:
        """Returns the texts of a model; after a failure they are read again. Raises StartupError."""
        reading = self._reading[model]
        if reading.done() and reading.exception() is not None:
            reading = self._reading[model] = self._begin(model)
        return await asyncio.shield(reading)

    async def all_read(self) -> None:
        """Returns when reading has ended, also if it failed for some models."""
        await asyncio.wait(self._reading.values())

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, model: HostedModel) -> asyncio.Future[FolderTexts]:
        def note(done: asyncio.Future[FolderTexts]) -> None:
            if not done.cancelled() and done.exception() is None:  # `texts` raises it
                model.chats = bool(done.result().template.source)

        read = partial(texts_of, self._settings[model], encodes=model.task is not None)
        reading = asyncio.get_running_loop().run_in_executor(self._thread, read)
        reading.add_done_callback(note)
        return reading


@asynccontextmanager
async def several_models(settings: RouterSettings) -> AsyncIterator[Front]:
    """Yields the front of a server of several models when the first model is loaded. Raises StartupError.

    By then the tokenizers of all models have been read.
    """
    assert settings.models_file is not None
    described = json.loads(await asyncio.to_thread(settings.models_file.read_text))
    own = [read_settings(RouterSettings, "text-generation-router", each["arguments"]) for each in described["models"]]
    hosted = [_hosted(each, of_it) for each, of_it in zip(described["models"], own, strict=True)]
    _check_names(hosted)
    by_model = dict(zip(hosted, own, strict=True))
    folders = ReadOnce(by_model)

    def open_service(model: HostedModel) -> AbstractAsyncContextManager[Service]:
        return assembled(by_model[model], metrics=model.metrics, texts=partial(folders.texts, model))

    reader, writer = await asyncio.open_unix_connection(described["control"])
    models = Models(
        hosted,
        described["memory_bytes"],
        open_service,
        lambda index: writer.write(json.dumps({"load": index}).encode() + b"\n"),
        settings.max_stored_responses,
    )
    shown = SeveralMetrics({model.name: model.metrics for model in hosted}, models.metrics)
    for model in hosted:
        model.metrics.shown = shown
    listening = asyncio.create_task(_listen(reader, models))
    try:
        first = await _first_service(models)
        await folders.all_read()
        limit = settings.payload_limit or IMAGES_PAYLOAD_LIMIT
        names = ", ".join(f"{model.name} ({model.state})" for model in hosted)

        def create(rules: AccessRules) -> ASGIApp:
            return create_models_app(models, rules, limit)

        yield Front(create, hosted[0].metrics, first.tenant_secret, names)
    finally:
        listening.cancel()
        await models.close()
        folders.close()
        writer.close()


def _hosted(described: dict[str, Any], settings: RouterSettings) -> HostedModel:
    names = settings.served_model_name or [public_name(settings.model_id or "")]
    return HostedModel(
        names,
        Resident(
            names[0],
            described["bytes"],
            described["pinned"],
            described["idle_seconds"],
            described["priority"],
            preload=True,
        ),
        described["task"],
    )


def _check_names(models: Sequence[HostedModel]) -> None:
    """Raises StartupError if two models have the same name."""
    names = [name for model in models for name in model.names]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise StartupError(f"--models: two models are called {twice!r}; name them: --models a=MODEL,b=MODEL")


async def _listen(reader: asyncio.StreamReader, models: Models) -> None:
    """Passes the launcher's reports to `models`."""
    while line := await reader.readline():
        report = json.loads(line)
        models.told(report["model"], report["state"], report["reason"])


async def _first_service(models: Models) -> Service:
    """Returns the service of the default model or, if that cannot be loaded, of the next model that is.

    Raises StartupError if no model can be loaded.
    """
    while True:
        for model in models.models:
            if model.service is not None:
                return model.service
            if model.state != "failed":
                break
        else:
            reasons = "; ".join(f"{model.name}: {model.resident.reason}" for model in models.models)
            raise StartupError(f"no model could be loaded: {reasons}")
        await models.changed.wait()
