"""Start-up: from settings to everything that answers requests."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from time import monotonic

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import Grammar
from tgi_server.router.capacity import Capacity
from tgi_server.router.chat_template import ChatTemplate
from tgi_server.router.errors import GenerationFailed, RouterError, StartupError, Unhealthy
from tgi_server.router.metrics import Metrics
from tgi_server.router.request import Limits
from tgi_server.router.scheduler import Scheduler
from tgi_server.router.scheduling.settings import SchedulerSettings
from tgi_server.router.service import ModelDescription, Service
from tgi_server.router.settings import RouterSettings
from tgi_server.router.shard_client import ShardedClient
from tgi_server.router.tokenization import TokenizerThreads, load_tokenizer
from tgi_server.router.tokenizer_config import read_tokenizer_config
from tgi_server.router.tracing import RequestTracer
from tgi_server.router.validation import Validator, grammar_refusal
from tgi_server.wire import grammar_to_message

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 10.0
HEALTH_SECONDS = 10.0
"""What a health check may take."""

_CLEAR_SECONDS = 60.0


@asynccontextmanager
async def assembled(settings: RouterSettings) -> AsyncIterator[Service]:
    """Reads the tokenizer, connects to the shards, warms them up, and runs the scheduler while the context is open.

    Raises StartupError with one line that says what is missing.
    """
    model = settings.tokenizer_name
    config = await asyncio.to_thread(read_tokenizer_config, model, settings.tokenizer_config_path)
    template = ChatTemplate(config)
    threads = TokenizerThreads(await asyncio.to_thread(load_tokenizer, model, config), settings.validation_workers)
    guard = None if settings.allow_special_tokens else await asyncio.to_thread(threads.tokenizer.special_token_guard)
    shards = await _connect(settings.master_shard_uds_path)
    try:
        info, capacity = await _warm_up(shards, settings)
        limits = _limits(settings, capacity)
        metrics = Metrics()
        scheduler = Scheduler(shards, info, capacity, _scheduler_settings(limits), metrics)

        async def grammar_fault(grammar: Grammar) -> str | None:
            try:
                return await shards.compile(grammar_to_message(grammar))
            except Unhealthy as error:
                raise GenerationFailed(str(error)) from error

        refusal = grammar_refusal(disabled=settings.disable_grammar_support, supported=info.grammars)
        scheduler.start()
        try:
            yield Service(
                model=_describe(settings, info),
                limits=limits,
                tokenizer=threads.tokenizer,
                threads=threads,
                template=template,
                validator=Validator(limits, threads, info.vocab_size, refusal, grammar_fault),
                submitter=scheduler,
                capacity=Capacity(limits.max_concurrent_requests),
                metrics=metrics,
                tracer=RequestTracer(enabled=settings.otlp_endpoint is not None),
                check_health=_HealthCheck(scheduler, shards),
                payload_limit=settings.payload_limit,
                validation_workers=settings.validation_workers,
                special_tokens=guard,
            )
        finally:
            await scheduler.stop()
    finally:
        await shards.close()
        threads.close()


class _HealthCheck:
    """Has the shards compute something; checks that come together share one answer.

    Shards that compute a step hear the question late, so the step's answer is one to it, too.
    """

    def __init__(self, scheduler: Scheduler, shards: ShardedClient) -> None:
        self._scheduler = scheduler
        self._shards = shards
        self._running: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        """Raises Unhealthy."""
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._check())
        await asyncio.shield(self._running)

    async def _check(self) -> None:
        asked = asyncio.ensure_future(self._shards.health(HEALTH_SECONDS))
        step = asyncio.ensure_future(self._scheduler.next_answer())
        try:
            await asyncio.wait((asked, step), return_when=asyncio.FIRST_COMPLETED)
            if asked.done() or not self._scheduler.healthy:
                await asked
        finally:
            asked.cancel()
            step.cancel()


async def _connect(path: str) -> ShardedClient:
    """Waits for the shards for as long as they take to load; whoever started them knows when there is no more hope."""
    started = monotonic()
    while True:
        try:
            return await ShardedClient.connect(path, timeout_s=_REPORT_SECONDS)
        except Unhealthy:
            logger.info("waiting for the shard at %s (%.0f s)", path, monotonic() - started)


async def _warm_up(shards: ShardedClient, settings: RouterSettings) -> tuple[pb.InfoResponse, pb.WarmupResponse]:
    try:
        info = await shards.info()
        # A router that was here before may have left requests behind.
        await shards.clear_cache(pb.ClearCacheRequest(), _CLEAR_SECONDS).answer()
        capacity = await shards.warmup(
            pb.WarmupRequest(
                max_prefill_tokens=settings.max_batch_prefill_tokens,
                max_batch_size=settings.max_batch_size or settings.max_concurrent_requests,
                max_total_tokens=settings.max_total_tokens,
                max_batch_total_tokens=settings.max_batch_total_tokens,
            )
        )
    except RouterError as error:
        raise StartupError(f"the shards could not warm up: {error}") from error
    return info, capacity


def _limits(settings: RouterSettings, capacity: pb.WarmupResponse) -> Limits:
    max_total_tokens = capacity.max_total_tokens
    if settings.max_total_tokens and settings.max_total_tokens > max_total_tokens:
        raise StartupError(
            f"--max-total-tokens {settings.max_total_tokens} is more than the model and the memory allow: "
            f"{max_total_tokens}"
        )
    max_input_tokens = settings.max_input_tokens or max_total_tokens - 1
    if max_input_tokens >= max_total_tokens:
        raise StartupError(
            f"--max-input-tokens {max_input_tokens} must be less than the {max_total_tokens} tokens "
            "that a prompt and its answer may have together"
        )
    return Limits(
        max_concurrent_requests=settings.max_concurrent_requests,
        max_best_of=settings.max_best_of,
        max_stop_sequences=settings.max_stop_sequences,
        max_top_n_tokens=settings.max_top_n_tokens,
        max_input_tokens=max_input_tokens,
        max_total_tokens=max_total_tokens,
        max_batch_prefill_tokens=settings.max_batch_prefill_tokens,
        max_batch_total_tokens=capacity.max_batch_total_tokens,
        max_waiting_tokens=settings.max_waiting_tokens,
        waiting_served_ratio=settings.waiting_served_ratio,
        max_batch_size=settings.max_batch_size or settings.max_concurrent_requests,
        max_client_batch_size=settings.max_client_batch_size,
    )


def _scheduler_settings(limits: Limits) -> SchedulerSettings:
    return SchedulerSettings(
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        max_batch_total_tokens=limits.max_batch_total_tokens,
        max_batch_size=limits.max_batch_size,
        max_waiting_tokens=limits.max_waiting_tokens,
        waiting_served_ratio=limits.waiting_served_ratio,
    )


def _describe(settings: RouterSettings, info: pb.InfoResponse) -> ModelDescription:
    return ModelDescription(
        model_id=settings.model_id or info.model_id,
        revision=settings.revision or info.revision or None,
        compute_type="cpu" if info.device_type == "cpu" else "gpu+optimized",
        encoder_decoder=info.encoder_decoder,
        version=_version(),
    )


def _version() -> str:
    try:
        return version("oatmill")
    except PackageNotFoundError:  # runs from a checkout that is not installed
        return "0+checkout"
