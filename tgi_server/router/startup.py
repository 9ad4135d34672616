"""Start-up: from settings to everything that answers requests."""

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from opentelemetry.trace import get_tracer
from starlette.types import ASGIApp

from shared.addresses import is_loopback
from shared.event_loop import watch_event_loop
from shared.settings import package_version
from shared.stop_signals import ignore_stop_signals, on_stop_signal
from shared.stubs import generate_pb2 as pb
from tgi_server import demo_model
from tgi_server.router.answers.formats import TGI_FORMAT, tool_format
from tgi_server.router.answers.reasoning import ReasoningTags, reasoning_tags
from tgi_server.router.answers.response_template import ResponseTemplate
from tgi_server.router.answers.tools import AnswerForm
from tgi_server.router.api.access import AccessRules
from tgi_server.router.api.app import ReplaceableApp, create_app, loading_app, metrics_app
from tgi_server.router.api.connections import Connections, connection_limits
from tgi_server.router.api.server import HttpServer, drain, listen, reserve
from tgi_server.router.errors import RouterError, StartupError, Unhealthy
from tgi_server.router.limits import Limits
from tgi_server.router.media.images import MOST_SENT, ImageReader
from tgi_server.router.metrics import ImageMetrics, Metrics
from tgi_server.router.option_reader import OptionReader
from tgi_server.router.scheduling import calls
from tgi_server.router.scheduling.adapter_registry import Adapters
from tgi_server.router.scheduling.grammars import PinnedGrammars
from tgi_server.router.scheduling.health import HealthCheck
from tgi_server.router.scheduling.image_places import MOST_WHOLE
from tgi_server.router.scheduling.pace import PromptPace
from tgi_server.router.scheduling.prefix_disk import DiskPrefixes
from tgi_server.router.scheduling.prefix_folder import PrefixFolder
from tgi_server.router.scheduling.scheduler import Scheduler
from tgi_server.router.scheduling.shard_client import ShardedClient
from tgi_server.router.service import UNLIMITED, Capacity, ModelDescription, RequestPolicy, Service, TextParts
from tgi_server.router.settings import PipelineSettings, RouterSettings, ServingSettings
from tgi_server.router.text.chat_template import ChatTemplate
from tgi_server.router.text.encoder import Encoders, ServedEncoder
from tgi_server.router.text.folder_texts import FolderTexts, read_texts
from tgi_server.router.text.preparation import Preparer, grammar_refusal
from tgi_server.router.text.tokenizer import ReadTokenizer, TextTokenizer, TokenizerThreads
from tgi_server.router.text.tokenizer_config import read_object

logger = logging.getLogger(__name__)

# Seconds between log lines of the router while shards load; the launcher reports their progress.
_REPORT_SECONDS = 60.0

_CLEAR_SECONDS = 60.0
# Requests in flight and in a batch, and prompt tokens of a step, if neither the operator nor the shards choose.
_REQUESTS, _PREFILL_TOKENS = 128, 4096
# Bytes of a body, for models that read text only, and for models that read images.
_PAYLOAD_LIMIT, IMAGES_PAYLOAD_LIMIT = 2_000_000, 32_000_000
_METRICS_GRACE_SECONDS = 1
_METRICS_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class Front:
    """A server that is ready. create: makes the application, given the rules of access. metrics: metrics of the
    process. tenant_secret: see `Service`. computation: description of the model's computation for the log.
    """

    create: Callable[[AccessRules], ASGIApp]
    metrics: Metrics
    tenant_secret: bytes | None
    computation: str


@asynccontextmanager
async def one_model(settings: RouterSettings) -> AsyncIterator[Front]:
    """Yields the front of a server of one model. Raises StartupError."""
    async with assembled(settings) as service:
        yield Front(partial(create_app, service), service.metrics, service.tenant_secret, service.model.computation)


async def run(
    settings: RouterSettings, open_front: Callable[[RouterSettings], AbstractAsyncContextManager[Front]] = one_model
) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests finish. Raises StartupError.

    A signal before the server is ready ends it at once: the task is cancelled.
    """
    task = asyncio.current_task()
    assert task is not None
    on_stop_signal(task.cancel)
    limits = connection_limits(settings.max_connections, settings.max_connections_per_address)
    listener = reserve(settings.hostname, settings.port, "--port")
    metrics_listener = None
    if settings.prometheus_port:
        metrics_listener = reserve(settings.hostname, settings.prometheus_port, "--prometheus-port")
    app = ReplaceableApp(loading_app(Path(settings.master_shard_uds_path.removeprefix("unix://"))))
    patience = settings.client_timeout
    connections = Connections(*limits, settings.max_client_memory * 2**20)
    servers = {HttpServer(app, settings.graceful_termination_timeout, patience, connections): listener}
    listen([listener])
    serving = [asyncio.create_task(server.serve([each])) for server, each in servers.items()]
    try:
        async with open_front(settings) as front:
            _collect_garbage_seldom()
            connections.on_broken = front.metrics.connection_broken
            connections.account.on_counted = front.metrics.client_memory
            rules = access_rules(settings, listener)
            if front.tenant_secret is not None:
                rules = replace(rules, secret=front.tenant_secret)
            app.current = front.create(rules)
            if metrics_listener is not None:
                scrapers = Connections(_METRICS_CONNECTIONS, _METRICS_CONNECTIONS)
                exposing = HttpServer(metrics_app(front.metrics, rules), _METRICS_GRACE_SECONDS, patience, scrapers)
                servers[exposing] = metrics_listener
                listen([metrics_listener])
                serving.append(asyncio.create_task(exposing.serve([metrics_listener])))
            on_stop_signal(lambda: drain(servers))
            port = listener.getsockname()[1]
            logger.info("ready on http://%s:%d: %s", settings.hostname, port, front.computation)
            watch = asyncio.create_task(watch_event_loop(front.metrics.event_loop_lag), name="event loop watch")
            try:
                with _known_as_ready(settings.ready_uds_path):
                    await asyncio.gather(*serving)
            finally:
                watch.cancel()
    finally:
        for task in serving:
            task.cancel()
    ignore_stop_signals()
    logger.info("stopped")


@contextmanager
def _known_as_ready(path: Path | None) -> Iterator[None]:
    """Listens on a Unix socket while the router serves, as shards do. No data is sent there."""
    if path is None:
        yield
        return
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield


@asynccontextmanager
async def assembled(
    settings: PipelineSettings,
    connect: Callable[[], Awaitable[ShardedClient]] | None = None,
    metrics: Metrics | None = None,
    texts: Callable[[], Awaitable[FolderTexts]] | None = None,
) -> AsyncIterator[Service]:
    """Reads the tokenizer, connects to the shards, warms them up, and runs the scheduler while the context is open.

    settings: RouterSettings for callers over HTTP; else requests come from this process alone, and have no limits of
    bytes and of number. connect: returns the client of the shards; None: that of the shards on the settings' socket.
    metrics: existing metrics to continue; None: new ones. texts: returns the texts of the model's folder; None: they
    are read.

    Raises StartupError with one line that says what is missing.
    """
    serving = settings if isinstance(settings, RouterSettings) else None
    own = await (asyncio.to_thread(texts_of, settings) if texts is None else texts())
    threads = TokenizerThreads(own.tokenizer, settings.validation_workers)
    if connect is None:
        assert serving is not None  # or there is no socket
        connect = partial(_connect, serving.master_shard_uds_path)
    shards = await connect()
    try:
        adapters = Adapters(shards, settings.max_loras)
        await _add_adapters(adapters, settings)
        info, capacity = await _warm_up(shards, settings, adapters)
        encoders = await asyncio.to_thread(_encoders, info, shards, threads, settings, own.encoders)
        limits = _limits(settings, info, capacity)
        if (tokens := own.tokenizer.vocab_size) > info.vocab_size:
            warning = "the tokenizer has %d tokens, the model %d: prompts with unknown tokens are refused"
            logger.warning(warning, tokens, info.vocab_size)
        described = _describe(settings, info, capacity)
        if taken := [adapter.id for adapter in adapters if described.is_named(adapter.id)]:
            raise StartupError(f"--lora-adapters: {taken[0]!r} is a name of the model itself; choose another id")
        metrics = metrics or Metrics()
        metrics.fallbacks(len(capacity.fallbacks))
        pace = _pace(settings, limits, info)
        disk = await _open_disk(settings, shards)
        scheduler = Scheduler(
            shards,
            info,
            capacity,
            limits,
            metrics,
            pace,
            adapters=adapters,
            prefix_caching=settings.prefix_caching,
            disk=disk,
            fair=serving is not None and serving.fairness == "key",
            admission=settings.admission == "time",
            target_gap_ms=settings.target_token_gap_ms or 0.0,
        )
        if not own.template.source and not info.encoders_only:
            logger.warning(
                "the model has no chat template, so chats are refused; --tokenizer-config-path can give one; "
                "/generate and /v1/completions need none"
            )
        images, no_images = await asyncio.to_thread(_image_reader, settings, info, limits, threads, metrics.images)
        form, thoughts = await asyncio.to_thread(
            _answer_form, settings, own.template, own.tokenizer, own.config.response_template
        )
        refusal = grammar_refusal(disabled=settings.disable_grammar_support, supported=info.grammars)
        scheduler.start()
        try:
            yield Service(
                model=described,
                limits=limits,
                policy=_policy(settings, reads_images=images is not None),
                text=TextParts(
                    own.tokenizer, threads, own.template, own.special_tokens, form, images, no_images, own.config
                ),
                options=OptionReader(limits, info.vocab_size, tuple(info.eos_token_ids), own.sampling),
                preparer=Preparer(
                    limits,
                    threads,
                    info.vocab_size,
                    refusal,
                    PinnedGrammars(shards).compile,
                    adapters,
                    info.eos_token_ids,
                    thoughts,
                    images,
                ),
                adapters=adapters,
                submitter=scheduler,
                capacity=Capacity(UNLIMITED if serving is None else limits.max_concurrent_requests),
                metrics=metrics,
                tracer=None if serving is None or serving.otlp_endpoint is None else get_tracer("tgi_server.router"),
                check_health=HealthCheck(scheduler, shards),
                decisions=own.decisions,
                encoders=encoders,
                generates=not info.encoders_only,
                caches=scheduler.batch.memory.caches,
                forget=scheduler.forget,
                sleep_mode=scheduler.sleep_mode,
                tenant_secret=None if disk is None else disk.folder.secret("tenants"),
            )
        finally:
            await scheduler.stop()
            if images is not None:
                await images.close()
    finally:
        await shards.close()
        threads.close()


def texts_of(settings: PipelineSettings, *, encodes: bool = False) -> FolderTexts:
    """Reads the files of a model's folder that concern texts (`read_texts`). Raises StartupError."""
    return read_texts(
        settings.tokenizer_name,
        settings.tokenizer_config_path,
        guard_special_tokens=not settings.allow_special_tokens,
        own_sampling=settings.generation_config == "auto",
        encodes=encodes,
    )


def _policy(settings: PipelineSettings, *, reads_images: bool) -> RequestPolicy:
    if not isinstance(settings, ServingSettings):
        return RequestPolicy(
            UNLIMITED,
            settings.validation_workers,
            max_stored_responses=0,
            strict_fields=True,
            max_priority=settings.max_priority,
            explain_misses="off" if settings.explain_misses == "off" else "all",
            is_local=True,
        )
    return RequestPolicy(
        settings.payload_limit or (IMAGES_PAYLOAD_LIMIT if reads_images else _PAYLOAD_LIMIT),
        settings.validation_workers,
        settings.max_stored_responses,
        settings.strict_fields,
        settings.adapter_root if settings.allow_adapter_updates else None,
        settings.max_priority,
        settings.enable_sleep_mode,
        settings.explain_misses,
    )


def _image_reader(
    settings: PipelineSettings,
    info: pb.InfoResponse,
    limits: Limits,
    threads: TokenizerThreads,
    metrics: ImageMetrics,
) -> tuple[ImageReader | None, str]:
    """Returns the image reader and an empty text, or None and the reason why the model reads no images."""
    if not info.images:
        if settings.allowed_media_domains:
            logger.warning("--allowed-media-domains does nothing: the model does not read images")
        return None, info.no_images or "this model reads text only"
    config = read_object(settings.tokenizer_name / "config.json")
    token_id = next((config[name] for name in ("image_token_id", "image_token_index") if name in config), None)
    token = None if token_id is None else threads.tokenizer.added_tokens.get(token_id)
    if token_id is None or token is None:
        return None, f"the model's tokenizer has no token for images (`image_token_id` is {token_id})"
    # Servers of texts alone do without these libraries.
    from tgi_server.router.media.fetching import Fetcher
    from tgi_server.router.media.workers import Workers

    if not info.shares_memory:
        logger.info("image tensors are copied to the shards, which cannot read the router's shared memory")
    workers = Workers(
        settings.tokenizer_name,
        settings.validation_workers,
        settings.max_image_pixels,
        least_shared=MOST_SENT if info.shares_memory else None,
    )
    fetcher = Fetcher(settings.allowed_media_domains)
    return ImageReader(
        fetcher, workers, threads, token_id, token, limits.max_input_tokens, metrics, shares_memory=info.shares_memory
    ), ""


async def _connect(path: str) -> ShardedClient:
    """Waits for the shards for as long as they take to load; the launcher ends the router if one of them fails."""
    started = monotonic()
    while True:
        try:
            return await ShardedClient.connect(path, timeout_s=_REPORT_SECONDS)
        except Unhealthy:
            logger.info("waiting for the shard at %s (%.0f s)", path, monotonic() - started)


async def _add_adapters(adapters: Adapters, settings: PipelineSettings) -> None:
    for source in settings.lora_adapters:
        if source.path is None:
            raise StartupError(f"--lora-adapters: there is no folder {source.place}; the launcher fetches adapters")
        try:
            adapter = await adapters.add(source.id, str(source.path))
        except RouterError as error:
            raise StartupError(f"--lora-adapters: {source.id}: {error}") from error
        logger.info("the adapter %s has the rank %d", adapter.id, adapter.rank)


async def _warm_up(
    shards: ShardedClient, settings: PipelineSettings, adapters: Adapters
) -> tuple[pb.InfoResponse, pb.WarmupResponse]:
    updates = isinstance(settings, ServingSettings) and settings.allow_adapter_updates
    places = settings.max_loras if updates else len(adapters)
    try:
        info = await shards.info()
        if info.encoders_only:
            tokens = max(info.max_position_embeddings, 2)
            return info, pb.WarmupResponse(max_total_tokens=tokens, max_batch_total_tokens=tokens)
        _check_context(settings, info)
        # An earlier router may have left requests behind.
        await shards.send(calls.clear_call(), _CLEAR_SECONDS).response()
        capacity = await shards.warmup(
            pb.WarmupRequest(
                max_prefill_tokens=(_prefill_tokens(settings) + MOST_WHOLE)
                if info.whole_images
                else settings.max_batch_prefill_tokens,
                max_batch_size=settings.max_batch_size or settings.max_concurrent_requests,
                max_total_tokens=settings.max_total_tokens,
                max_batch_total_tokens=settings.max_batch_total_tokens,
                adapter_bytes=adapters.missing_bytes(places),
            )
        )
    except RouterError as error:
        raise StartupError(f"the shards could not warm up: {error}") from error
    return info, capacity


async def _open_disk(settings: PipelineSettings, shards: ShardedClient) -> DiskPrefixes | None:
    """Opens the store of cached prefixes on disk; None if there is none, or if its folder cannot be used.

    Raises StartupError for a model whose prefixes cannot be stored.
    """
    if settings.prefix_disk is None:
        return None
    size, place = settings.prefix_disk
    try:
        described = await shards.describe_files()
    except RouterError as error:
        raise StartupError(f"--prefix-cache-disk: {error}") from error
    max_age_s = settings.prefix_cache_disk_days * 86400
    folder = PrefixFolder(place, size, described[0].layout, max_age_s, len(described))
    try:
        damaged = await asyncio.to_thread(folder.open)
    except OSError as error:
        logger.warning("cached prefixes are not stored on disk: %s", error)
        return None
    if damaged:
        logger.warning("%d damaged files with cached prefixes were deleted from %s", damaged, folder.folder)
    logger.info("cached prefixes are stored in %s, which has %d MB", folder.folder, folder.bytes >> 20)
    return DiskPrefixes(
        folder, sum(each.block_bytes for each in described), sum(each.snapshot_bytes for each in described)
    )


def _check_context(settings: PipelineSettings, info: pb.InfoResponse) -> None:
    """Raises StartupError for a context longer than the model's, unless --allow-long-context permits it."""
    wanted, positions = settings.max_total_tokens, info.max_position_embeddings
    if wanted is None or not positions or wanted <= positions:
        return
    if not settings.allow_long_context:
        raise StartupError(
            f"--max-total-tokens is {wanted}, but the model supports {positions} positions; lower it, or add "
            "--allow-long-context; output degrades beyond the limit"
        )
    logger.warning("--max-total-tokens is %d, but the model supports %d positions", wanted, positions)


def _limits(settings: PipelineSettings, info: pb.InfoResponse, capacity: pb.WarmupResponse) -> Limits:
    max_total_tokens = capacity.max_total_tokens
    if settings.max_total_tokens is None and max_total_tokens < info.max_position_embeddings:
        cause = "--max-batch-total-tokens" if settings.max_batch_total_tokens else "the memory for the KV cache"
        logger.warning(
            "prompt and answer may have %d tokens together; the model supports %d, but %s allows fewer",
            max_total_tokens,
            info.max_position_embeddings,
            cause,
        )
    if settings.max_total_tokens and settings.max_total_tokens > max_total_tokens:
        raise StartupError(
            f"--max-total-tokens is {settings.max_total_tokens}; "
            f"the model and the memory allow at most {max_total_tokens}"
        )
    max_input_tokens = settings.max_input_tokens or max_total_tokens - 1
    if max_input_tokens >= max_total_tokens:
        raise StartupError(
            f"--max-input-tokens is {max_input_tokens}; it must be less than the {max_total_tokens} tokens "
            "that a prompt and its answer may have together (--max-total-tokens)"
        )
    max_batch_size = settings.max_batch_size or settings.max_concurrent_requests or capacity.max_batch_size or _REQUESTS
    return Limits.chosen(
        {
            "max_best_of": settings.max_best_of,
            "max_client_batch_size": settings.max_client_batch_size,
            "max_stop_sequences": settings.max_stop_sequences,
            "max_top_n_tokens": settings.max_top_n_tokens,
        },
        max_concurrent_requests=settings.max_concurrent_requests or max(_REQUESTS, max_batch_size),
        max_input_tokens=max_input_tokens,
        max_total_tokens=max_total_tokens,
        max_batch_prefill_tokens=_prefill_tokens(settings, 0 if info.whole_images else capacity.max_prefill_tokens),
        max_batch_total_tokens=capacity.max_batch_total_tokens,
        max_waiting_tokens=settings.max_waiting_tokens,
        waiting_served_ratio=settings.waiting_served_ratio,
        max_batch_size=max_batch_size,
    )


def _prefill_tokens(settings: PipelineSettings, chosen: int = 0) -> int:
    """Returns the prompt tokens of a step. chosen: by the shards; 0: they have not."""
    return settings.max_batch_prefill_tokens or chosen or _PREFILL_TOKENS


def _pace(settings: PipelineSettings, limits: Limits, info: pb.InfoResponse) -> PromptPace:
    target_ms = settings.target_token_gap_ms
    return PromptPace(
        limits.max_batch_prefill_tokens, info.block_size or 1, None if target_ms is None else target_ms / 1000
    )


def _answer_form(
    settings: PipelineSettings, template: ChatTemplate, tokenizer: TextTokenizer, response_template: Any
) -> tuple[AnswerForm, ReasoningTags | None]:
    """Returns the form of answers, and the tags around the model's reasoning.

    response_template: the template in tokenizer_config.json, which is used if the form of calls is not known.
    """
    calls = tool_format(settings.tool_call_parser, template.source)
    thoughts = reasoning_tags(settings.reasoning_parser, template.source)
    auto = settings.tool_call_parser == settings.reasoning_parser == "auto"
    regions = _response_template(response_template) if auto and calls is TGI_FORMAT else None
    if regions is not None and (regions.has_calls or thoughts is None):
        thoughts = thoughts or regions.thoughts
        logger.info("answers are parsed with the model's response_template; its calls are not constrained by schemas")
        return AnswerForm(calls, thoughts, tokenizer.special_tokens, tokenizer.added_tokens, regions), thoughts
    as_text = not settings.disable_text_tool_calls
    if template.source:
        apart = "reasoning is returned separately" if thoughts else "reasoning is part of the text"
        logger.info("tools are called in the format %r; %s", calls.name, apart)
    form = AnswerForm(calls, thoughts, tokenizer.special_tokens, tokenizer.added_tokens, calls_as_text=as_text)
    return form, thoughts


def _response_template(spec: Any) -> ResponseTemplate | None:
    try:
        return None if spec is None else ResponseTemplate.read(spec)
    except ValueError as error:
        logger.warning("the model's response_template is ignored: %s", error)
        return None


def public_name(model_id: str) -> str:
    """Returns a model's id without paths of the server: the name of a local folder, or the model's id in a hub's cache.

    For a GGUF file this is the file's name, even if it is a link to a file with another name.
    """
    path = Path(model_id)
    if not path.is_absolute() and not path.exists():
        return model_id
    if path.is_file():
        return path.name
    path = path.resolve()
    if path == demo_model.PATH:
        return demo_model.NAME
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name or model_id


def _encoders(
    info: pb.InfoResponse,
    shards: ShardedClient,
    threads: TokenizerThreads,
    settings: PipelineSettings,
    read: ReadTokenizer,
) -> Encoders:
    """Returns the models that embed and rank. Raises StartupError for one whose tokenizer cannot be read."""
    # A name of the server is that of its only model.
    given = settings.served_model_name if info.encoders_only and len(info.encoders) == 1 else []
    gap_ms = settings.target_token_gap_ms
    return Encoders(
        {
            encoder.task: ServedEncoder(
                next(iter(given), public_name(encoder.model_id)), encoder, shards, threads, gap_ms, read
            )
            for encoder in info.encoders
        }
    )


def _describe(settings: PipelineSettings, info: pb.InfoResponse, capacity: pb.WarmupResponse) -> ModelDescription:
    given_id = settings.model_id or info.model_id
    model_id = public_name(given_id)
    return ModelDescription(
        model_id=model_id,
        given_id=given_id,
        names=settings.served_model_name or [model_id],
        revision=settings.revision or info.revision or None,
        compute_type="cpu" if info.device_type == "cpu" else "gpu+optimized",
        encoder_decoder=info.encoder_decoder,
        model_type=info.model_type,
        speculate=info.speculate,
        version=package_version(),
        quantization=info.quantization or None,
        kv_cache_dtype=info.kv_cache_dtype or None,
        linear_kernels=info.linear_kernels or None,
        forward_pass=info.forward_pass or None,
        device=info.device_type,
        dtype=info.dtype,
        paged=info.paged,
        weight_bytes=info.weight_bytes,
        fallbacks=tuple(capacity.fallbacks),
    )


def _collect_garbage_seldom() -> None:
    """Excludes the objects of start-up from garbage collection, and makes collections rare: a large body causes many.

    A body of two megabytes becomes up to a million objects. With the default thresholds creating them takes eight times
    as long, during which the event loop is blocked.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def access_rules(settings: RouterSettings, listener: socket.socket) -> AccessRules:
    """Returns the rules for callers of the server that listens on a socket."""
    own = {settings.hostname, socket.gethostname(), *settings.allowed_hosts}
    return AccessRules(
        settings.api_keys,
        settings.cors_allow_origin,
        {name.lower().rstrip(".") for name in own},
        is_loopback(listener.getsockname()[0]),
    )
