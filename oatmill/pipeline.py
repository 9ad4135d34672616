"""A model in this process: the shard's engine and the router's pipeline, on one event loop in a thread of their own.

There is neither HTTP nor gRPC between them, and nothing listens.
"""

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shared.openmp import leave_threads_unbound
from tgi_server.launcher.commands import shared_values
from tgi_server.launcher.machine import check_gpus
from tgi_server.launcher.preflight import check_model
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.launcher.weights import check_tokenizer, find_adapters, recognized
from tgi_server.router.settings import PipelineSettings
from tgi_server.shard.settings import ShardSettings

if TYPE_CHECKING:
    from tgi_server.router.service import Service
    from tgi_server.shard.server import Services

T = TypeVar("T")


class Pipeline:
    """Loads a model, and answers requests until it is closed. Any thread may call `submit` and `close`."""

    _service: "Service"

    def __init__(self, settings: LauncherSettings) -> None:
        """Loads the model, and returns once it can answer. Raises the error of loading."""
        self._ready: Future[None] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(settings,), name="oatmill", daemon=True)
        self._thread.start()
        import_module("oatmill.local_requests")  # takes a second, while the thread loads the model
        self._ready.result()

    @property
    def places(self) -> int:
        """The number of requests that are worth running or waiting at once."""
        return 2 * self._service.limits.max_concurrent_requests

    async def ask(self, path: str, body: bytes) -> bytes:
        """Returns the response to a request of the HTTP API, both as JSON. Raises RouterError."""
        from oatmill.local_requests import ask

        return await ask(self._service, path, body)

    async def stream(self, path: str, body: bytes, take: Callable[[bytes], None]) -> None:
        """Passes the server-sent events of the response to `take`, as they come. Raises RouterError."""
        from oatmill.local_requests import stream

        await stream(self._service, path, body, take)

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Runs `work` on the loop. Raises RuntimeError after `close`."""
        if self._stop.is_set() or not self._thread.is_alive():
            work.close()
            raise RuntimeError("the LLM is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Ends running requests, and frees the model's memory. Later calls do nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self, settings: LauncherSettings) -> None:
        import uvloop

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(settings))
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        self.__dict__.pop("_service", None)
        gc.collect()

    async def _serve(self, settings: LauncherSettings) -> None:
        self._loop = asyncio.get_running_loop()
        settings = settings.model_copy(update={"lora_adapters": await find_adapters(settings)})
        services, router = _load(settings)

        from tgi_server.router.scheduling.local_shard import LocalShard
        from tgi_server.router.scheduling.shard_client import ShardedClient
        from tgi_server.router.startup import assembled

        async def connect() -> ShardedClient:
            return ShardedClient([LocalShard(services.generation, services.grammars)])

        try:
            async with assembled(router, connect) as self._service:
                self._ready.set_result(None)
                await self._stop.wait()
        finally:
            services.close()


def _load(settings: LauncherSettings) -> "tuple[Services, PipelineSettings]":
    """Returns the services of a shard whose engine computes in this thread, and the settings of its router."""
    from tgi_server.model_files.download import download_model, find_models
    from tgi_server.shard.lean_imports import lean_imports

    trust = settings.trust_remote_code

    def fetch(model_id: str, revision: str | None = None, **own: str | None) -> Path:
        how = {"extension": ".safetensors", "auto_convert": True, "merge_lora": True, "trust_remote_code": trust}
        return download_model(model_id, revision, **how, **own)  # type: ignore[arg-type]

    check_gpus()
    own = {"gguf_file": settings.gguf_file, "tokenizer_name": settings.tokenizer_name}
    folder = fetch(settings.model_id, settings.revision, **own)
    settings = recognized(settings, folder)
    if settings.speculative_model:
        fetch(settings.speculative_model)
    values = shared_values(settings) | {"model_id": settings.model_id, "tokenizer_name": str(folder)}
    shard_values = values | {"tokenizer_name": settings.tokenizer_name}
    shard = ShardSettings.model_validate(_only(ShardSettings, shard_values))
    encoders = {
        task: folder if model_id == settings.model_id else fetch(model_id) for task, model_id in shard.encoders.items()
    }
    check_tokenizer(folder)
    check_model(settings, folder)
    model, drafter = None, None
    if settings.generates:
        model, drafter = find_models(
            settings.model_id, settings.revision, settings.speculative_model, trust_remote_code=trust, **own
        )
    leave_threads_unbound()
    with _without_collection(), lean_imports(whole=True):
        from tgi_server.shard.server import Place, Services, load_models  # imports torch, which takes seconds

        loaded = load_models(shard, model, drafter, encoders)
    services = Services(shard, model, encoders, loaded, [Place("", "")], on_fatal=lambda: None)
    return services, PipelineSettings.model_validate(_only(PipelineSettings, values))


def _only(settings: type[PipelineSettings] | type[ShardSettings], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in settings.model_fields}


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disables the garbage collector during imports, of whose time it takes a tenth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
