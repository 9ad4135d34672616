"""Runs one shard: loads the engine, then serves it on a Unix socket until it is stopped."""

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
import uvloop
from opentelemetry import trace

from shared.control_groups import available_ram
from shared.gpus import has_gpu, missing_gpus, unusable_gpus, visible_gpus
from shared.logging import flush_log
from shared.settings import fail
from shared.stop_signals import ignore_stop_signals, on_stop_signal
from shared.stubs.generate_pb2_grpc import (
    add_GrammarServiceServicer_to_server,
    add_TextGenerationServiceServicer_to_server,
)
from shared.tracing import configure_tracing, stop_tracing
from shared.user_cache import user_cache
from tgi_server.contract import Task
from tgi_server.engine import Engine, EngineConfig, EngineError
from tgi_server.engine.config import DTYPES
from tgi_server.engine.encoders import Encoder
from tgi_server.engine.errors import CannotConnect, PeerLost
from tgi_server.engine.kernels import compile_beside
from tgi_server.engine.memory import malloc_trim
from tgi_server.engine.parallel import ShardGroup, connect
from tgi_server.engine.progress import report_to
from tgi_server.engine.sleep import SleepingModel
from tgi_server.grammar import Sandbox
from tgi_server.loading import percent_of, remove_progress, write_progress
from tgi_server.shard.encoder_queue import EncoderQueue
from tgi_server.shard.encoder_service import EncoderService, encoder_message
from tgi_server.shard.grammar_queue import GrammarQueue
from tgi_server.shard.grammar_service import GrammarService
from tgi_server.shard.numa import keep_to_node
from tgi_server.shard.service import Place, TextGenerationService
from tgi_server.shard.settings import ShardSettings
from tgi_server.shard.sleep_calls import SleepCalls
from tgi_server.shard.sockets import grammar_socket, shard_socket
from tgi_server.shard.tracing import RequestSpans
from tgi_server.shard.turns import Turns

logger = logging.getLogger(__name__)

SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # The router pings a shard while it waits for an answer; by default gRPC closes connections with frequent pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]
STOP_SECONDS = 5
# Maximum number of concurrent calls to compile a grammar, each in a thread; gRPC refuses more. GrammarQueue holds
# fewer.
_GRAMMAR_CALLS = 256
# EX_SOFTWARE of sysexits.h: the device, or another shard, is lost.
FATAL_STATUS = 70


class LoadingProgress:
    """Writes the progress of loading to a file next to the socket, and each new stage to the log."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._percent = -1
        self._stage = ""

    def report(self, stage: str, fraction: float) -> None:
        """Reports a stage and the fraction done. Ignores less progress than before, as while a draft model loads."""
        percent = percent_of(stage, fraction)
        if percent <= self._percent:
            return
        if stage != self._stage:
            logger.info("loading: %s", stage)
        self._percent, self._stage = percent, stage
        write_progress(self._socket, percent, stage)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The models of a shard.

    engine: the text-generation model, or None. encoders: embedding and rerank models by task, in the first shard only.
    """

    engine: Engine | None
    group: ShardGroup | None
    encoders: Mapping[Task, Encoder]


def load(
    settings: ShardSettings,
    model_path: Path | None,
    speculative_model: Path | None = None,
    encoder_paths: Mapping[Task, Path] | None = None,
) -> Loaded:
    """Loads the models; the text-generation model together with the other shards. model_path: None: there is none.

    Raises SystemExit, after a one-line message, if a model cannot be loaded.
    """
    report_to(LoadingProgress(shard_socket(settings.uds_path, settings.rank)).report)
    try:
        return load_models(settings, model_path, speculative_model, encoder_paths)
    except EngineError as error:
        fail(settings.process_name, str(error), status=1)
    except PeerLost as error:
        fail(settings.process_name, f"another shard was lost while loading: {error}", status=FATAL_STATUS)


def load_models(
    settings: ShardSettings,
    model_path: Path | None,
    speculative_model: Path | None = None,
    encoder_paths: Mapping[Task, Path] | None = None,
) -> Loaded:
    """Loads the models as `load` does. Raises EngineError, or PeerLost."""
    compiles = settings.world_size == 1 and not has_gpu() and not settings.disable_custom_kernels
    if compiles and model_path is not None and _fits_twice(model_path):
        compile_beside()
    _check_gpus(settings)
    group = _connect(settings)
    encoders = {
        task: Encoder(task, engine_config(settings, path))
        for task, path in (encoder_paths or {}).items()
        if settings.rank == 0
    }
    if model_path is None:
        return Loaded(None, group, encoders)
    return Loaded(Engine(engine_config(settings, model_path, speculative_model, group)), group, encoders)


def _fits_twice(model_path: Path) -> bool:
    """Returns True if the weights fit into memory even if plain torch converts 16-bit weights to 32 bits."""
    return 2 * sum(file.stat().st_size for file in model_path.glob("*.safetensors")) < available_ram()


def serve(settings: ShardSettings, model_path: Path | None, encoder_paths: Mapping[Task, Path], loaded: Loaded) -> None:
    """Serves the models until SIGTERM or SIGINT."""
    # Objects created while loading live as long as the process, so the garbage collector need not visit them again.
    gc.collect()
    gc.freeze()
    malloc_trim()
    uvloop.run(_serve(settings, model_path, encoder_paths, loaded))
    if loaded.group is not None and loaded.engine is not None and loaded.engine.info.device_type == "cuda":
        _end_at_once(0)  # otherwise NCCL waits at exit for CUDA graphs with its kernels, which still exist


def engine_config(
    settings: ShardSettings,
    model_path: Path,
    speculative_model: Path | None = None,
    group: ShardGroup | None = None,
) -> EngineConfig:
    return EngineConfig(
        model_path=model_path,
        device=_device(settings),
        group=group,
        dtype=DTYPES[settings.dtype] if settings.dtype else None,
        memory_fraction=settings.cuda_memory_fraction,
        cpu_memory=settings.cpu_memory,
        image_memory=settings.image_memory,
        custom_kernels=not settings.disable_custom_kernels,
        quantize=settings.quantize,
        kv_cache_dtype=settings.kv_cache_dtype,
        linear_kernels=settings.linear_kernels,
        packed_cache=_packed_cache(settings),
        trust_remote_code=settings.trust_remote_code,
        watermark_gamma=settings.watermark_gamma,
        watermark_delta=settings.watermark_delta,
        speculate=settings.speculate,
        speculative_model=speculative_model,
        max_lora_rank=settings.max_lora_rank,
        cuda_graphs=None if settings.cuda_graphs is None else tuple(size for size in settings.cuda_graphs if size),
    )


def _packed_cache(settings: ShardSettings) -> Path | None:
    folder = settings.packed_weights_cache or user_cache() / "packed"
    return None if folder == Path("none") else folder


def _connect(settings: ShardSettings) -> ShardGroup | None:
    sharing_cores = settings.local_world_size or settings.world_size
    if settings.numa is not None:
        sharing_cores = keep_to_node(settings.numa, _local_rank(settings), sharing_cores)
    if settings.world_size == 1:
        return None
    return connect(
        settings.rank,
        settings.world_size,
        settings.master_addr,
        settings.master_port,
        device=_device(settings),
        local_world_size=settings.local_world_size,
        sharing_cores=sharing_cores,
        custom_kernels=not settings.disable_custom_kernels,
        all_reduce=settings.cuda_all_reduce,
    )


def _check_gpus(settings: ShardSettings) -> None:
    """Raises CannotConnect if torch cannot use a GPU that this process was assigned or requested.

    A torch without CUDA uses the CPU, with a warning, if the machine has a GPU that was not requested.
    """
    try:
        if torch.cuda.is_available():
            torch.ones(2, device=_device(settings)).sum().item()  # a GPU that is too old for this torch fails here
            return
        if torch.version.cuda is not None:
            torch.cuda.init()  # raises the reason why there is none
        reason = "this torch is built without CUDA"
    except (RuntimeError, AssertionError) as error:
        reason = f"torch cannot use it: {str(error).strip().splitlines()[0]}"
    error_line = missing_gpus(reason)
    if error_line is None and torch.version.cuda is not None:
        error_line = unusable_gpus(reason)
    if error_line is not None:
        raise CannotConnect(error_line)
    if visible_gpus():
        logger.warning("running on the CPU although this machine has a GPU: %s", reason)


def _local_rank(settings: ShardSettings) -> int:
    return settings.rank if settings.local_rank is None else settings.local_rank


def _device(settings: ShardSettings) -> torch.device:
    """Returns the device of this shard. Raises CannotConnect if this machine has fewer GPUs than shards."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = _local_rank(settings)
    if settings.world_size == 1:
        index = 0
    if index >= torch.cuda.device_count():
        raise CannotConnect(
            f"shard {settings.rank} is to run on GPU {index}, but this machine has {torch.cuda.device_count()}; "
            "lower --num-shard, or say which of this machine's GPUs it has by LOCAL_RANK"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _listen(server: grpc.aio.Server | grpc.Server, socket: Path, settings: ShardSettings) -> str:
    """Makes the server listen on its socket, or also on a port (listen_address). Returns the address for the router."""
    url = f"unix://{socket}"
    socket.unlink(missing_ok=True)
    server.add_insecure_port(url)
    if settings.listen_address is None:
        return url
    host = f"[{settings.listen_address}]" if ":" in settings.listen_address else settings.listen_address
    address = f"{host}:{server.add_insecure_port(f'{host}:0')}"
    logger.info("shard %d also listens on %s", settings.rank, address)
    return address


class Services:
    """The services of a shard: `generation` and `grammars`."""

    def __init__(
        self,
        settings: ShardSettings,
        model_path: Path | None,
        encoder_paths: Mapping[Task, Path],
        loaded: Loaded,
        places: Sequence[Place],
        *,
        on_fatal: Callable[[], None],
        spans: RequestSpans | None = None,
    ) -> None:
        """places, on_fatal, spans: as in TextGenerationService."""
        engine = loaded.engine
        self._queue = _grammar_queue(engine, model_path) if engine is not None and model_path is not None else None
        encodes = bool(loaded.encoders) or (engine is not None and engine.tower is not None)
        beside, device = engine is not None, _device(settings)
        self._encoders = EncoderQueue(loaded.encoders, Turns(), device, beside=beside) if encodes else None
        encoders = [
            encoder_message(each, settings.encoders[task], encoder_paths[task])
            for task, each in loaded.encoders.items()
        ]
        self.grammars = GrammarService(self._queue)
        sleeping = SleepingModel(engine, loaded.encoders.values(), _packed_cache(settings))
        sleep = SleepCalls(sleeping, self._encoders, self._queue, on_fatal)
        self.generation: TextGenerationService | EncoderService
        if engine is None:
            assert self._encoders is not None  # or nothing would be served
            self.generation = EncoderService(self._encoders, encoders, (places[0].url, places[0].grammar_url), sleep)
            return
        self.generation = TextGenerationService(
            engine,
            settings.model_id,
            settings.revision,
            places,
            self._queue,
            sleep,
            on_fatal=on_fatal,
            spans=spans,
            encoders=self._encoders,
            encoder_infos=encoders,
        )

    def close(self) -> None:
        """Ends running batches, the threads, and the sandbox of grammars."""
        if isinstance(self.generation, TextGenerationService):
            self.generation.end_run("the shard is shutting down")
        if self._encoders is not None:
            self._encoders.close()
        if self._queue is not None:
            self._queue.close()


async def _serve(
    settings: ShardSettings, model_path: Path | None, encoder_paths: Mapping[Task, Path], loaded: Loaded
) -> None:
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    asyncio.get_running_loop().set_exception_handler(_end_without_memory)
    socket = shard_socket(settings.uds_path, settings.rank)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    grammar_threads = ThreadPoolExecutor(_GRAMMAR_CALLS, thread_name_prefix="grammar-calls")
    grammar_server = grpc.server(grammar_threads, options=SERVER_OPTIONS, maximum_concurrent_rpcs=_GRAMMAR_CALLS)
    place = Place(_listen(server, socket, settings), _listen(grammar_server, grammar_socket(socket), settings))
    configure_tracing(settings.otlp_service_name, settings.otlp_endpoint)
    spans = RequestSpans(trace.get_tracer(__name__), settings.rank) if settings.otlp_endpoint else None
    places = _all_places(place, loaded.group)
    services = Services(settings, model_path, encoder_paths, loaded, places, on_fatal=_end_at_once, spans=spans)
    add_GrammarServiceServicer_to_server(services.grammars, grammar_server)
    add_TextGenerationServiceServicer_to_server(services.generation, server)
    await server.start()
    grammar_server.start()
    remove_progress(socket)
    logger.info("shard %d is ready on %s", settings.rank, socket)
    try:
        await stop.wait()
        grammar_server.stop(0)
        services.close()
        await server.stop(STOP_SECONDS)
    finally:
        for each in (socket, grammar_socket(socket)):
            each.unlink(missing_ok=True)
        stop_tracing()
    ignore_stop_signals()
    logger.info("shard %d has stopped", settings.rank)


def _end_at_once(status: int = FATAL_STATUS) -> None:
    """Ends the process without clean-up, which could wait for a lost device, or need memory."""
    try:
        flush_log()
    finally:
        os._exit(status)


def _end_without_memory(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handles uncaught exceptions. Ends the process after a MemoryError, as gRPC's own tasks may have ended with it."""
    if isinstance(context.get("exception"), MemoryError):
        logger.critical("out of memory: this shard ends; lower --cpu-memory")
        _end_at_once()
    loop.default_exception_handler(context)


def _grammar_queue(engine: Engine, model_path: Path) -> GrammarQueue | None:
    """Returns the queue of grammars to compile; None if the model's folder has no tokenizer."""
    if engine.grammars is None:
        return None
    return GrammarQueue(engine.grammars, Sandbox(model_path, engine.info.vocab_size, engine.info.eos_token_ids))


def _all_places(own: Place, group: ShardGroup | None) -> list[Place]:
    """Returns the addresses of all shards, in rank order."""
    if group is None:
        return [own]
    return [Place(*urls) for urls in zip(group.exchange(own.url), group.exchange(own.grammar_url), strict=True)]
