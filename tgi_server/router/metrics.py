"""The metrics of the router, under TGI's names. Durations are in seconds, lengths in tokens.

Observations are made on the event loop's thread; each takes about a microsecond.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, repeat
from time import perf_counter, time

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tgi_server.router.adapter_source import OTHER_ADAPTERS
from tgi_server.router.histogram import Histogram
from tgi_server.router.process_metrics import ProcessMetrics
from tgi_server.router.prompt_source import MissCause

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# 0.1 ms to about 164 s, each bound half as large again as the one before.
_SECONDS = tuple(accumulate(repeat(1.5, 35), lambda bound, factor: round(bound * factor, 7), initial=0.0001))
_TOKENS = tuple(float(2**power) for power in range(21))
_SIZES = tuple(float(2**power) for power in range(12))

# Label values of adapters; all further adapters are counted together.
_ADAPTER_NAMES = 256

# TGI's counters. prometheus_client names every counter `..._total`; TGI's dashboards know these without it.
TGI_COUNTERS = frozenset(
    {
        *("tgi_request_count", "tgi_request_success", "tgi_request_failure"),
        *("tgi_batch_inference_count", "tgi_batch_inference_success", "tgi_batch_concat"),
    }
)
_TOTAL = re.compile(
    rf"^((?:# (?:HELP|TYPE) )?(?:{'|'.join(sorted(TGI_COUNTERS))}))_total(?=[ {{])".encode(), re.MULTILINE
)


class Method(Enum):
    """The call that computes a batch; the values are label values."""

    PREFILL = "prefill"
    DECODE = "decode"


class ConcatReason(Enum):
    """The reason why waiting requests join a running batch; the values are label values, TGI's where it has one."""

    ROOM = "chunking"  # the running batch is at most half full
    BACKPRESSURE = "backpressure"  # the waiting requests outnumber the running ones by `waiting_served_ratio`
    WAIT_EXCEEDED = "wait_exceeded"  # `max_waiting_tokens` decode steps have passed without a prefill
    DEADLINE = "deadline"  # a waiting request would be too late if it waited any longer
    PREEMPTION = "preemption"  # running requests are preempted by a waiting one


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds that one successful request spent in each phase.

    first_token: from the request's arrival to its first token.
    """

    total: float
    validation: float
    queue: float
    inference: float
    per_token: float
    first_token: float


class _Registry:
    """Makes metrics, each with its name, its description and its labels, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, labels, registry=self._registry)

    def failures(self, name: str, meaning: str) -> Callable[[str], None]:
        """Returns a function that counts a failure by the type of its error."""
        failures = self.counter(name, meaning, "err")
        return lambda error_type: failures.labels(error_type).inc()

    def gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, registry=self._registry)

    def seconds(self, name: str, meaning: str, label: str | None = None) -> Histogram:
        return Histogram(name, meaning, _SECONDS, label, self._registry)

    def tokens(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, _TOKENS, None, self._registry)

    def requests(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, _SIZES, None, self._registry)


class RequestMetrics:
    """One request's life, reported by the HTTP side.

    received: counts a request. gap: takes the seconds between two steps' tokens of a request. accepted_drafts: takes
    the drafted tokens of a request in a step; called by the scheduler, where shards speculate.
    """

    def __init__(self, made: _Registry) -> None:
        duration = "tgi_request_{}_duration".format
        self.received = made.counter("tgi_request_count", "Generation requests received.").inc
        self._success = made.counter("tgi_request_success", "Generation requests that succeeded.")
        self.failed = made.failures("tgi_request_failure", "Generation requests that failed, by error type.")
        self._by_adapter = made.counter(
            "tgi_request_adapter_count",
            "Generation requests by adapter; an empty label means no adapter, `_other` all beyond the first 256.",
            "adapter",
        )
        self._adapters: set[str] = set()
        missed = made.counter(
            "tgi_prefix_cache_miss_tokens",
            "Prompt tokens that were not found in the prefix cache, by the cause that most tokens of the prompt have.",
            "cause",
        )
        self._missed = {cause: missed.labels(cause.value) for cause in MissCause}
        self._total = made.seconds("tgi_request_duration", "Time from a request's arrival to its last token.")
        self._phases: dict[str, Histogram] = {
            "validation": made.seconds(duration("validation"), "Time to validate and tokenize a request."),
            "queue": made.seconds(duration("queue"), "Time a request waits in the queue."),
            "inference": made.seconds(duration("inference"), "Time from leaving the queue to the last token."),
            "per_token": made.seconds(
                duration("mean_time_per_token"), "Inference time of a request divided by its generated tokens."
            ),
            "first_token": made.seconds(
                duration("time_to_first_token"), "Time from a request's arrival to its first token."
            ),
        }
        self.gap = made.seconds(
            duration("inter_token"), "Time between two consecutive steps' tokens of a request."
        ).observe
        self._input_length = made.tokens("tgi_request_input_length", "Number of prompt tokens.")
        self._max_new_tokens = made.tokens(
            "tgi_request_max_new_tokens", "Maximum number of tokens to generate for a request."
        )
        self._generated_tokens = made.tokens("tgi_request_generated_tokens", "Number of generated tokens.")
        self.accepted_drafts = made.tokens(
            "tgi_request_skipped_tokens", "Accepted draft tokens of a request in one step."
        ).observe

    def validated(self, input_length: int, max_new_tokens: int) -> None:
        self._input_length.observe(input_length)
        self._max_new_tokens.observe(max_new_tokens)

    def computed_by(self, adapter_id: str | None) -> None:
        """Counts a request that names an adapter. Beyond a number of names, adapters are counted together."""
        name = adapter_id or ""
        if name not in self._adapters and len(self._adapters) >= _ADAPTER_NAMES:
            name = OTHER_ADAPTERS
        self._adapters.add(name)
        self._by_adapter.labels(name).inc()

    def missed(self, cause: MissCause, tokens: int) -> None:
        """Counts tokens of a prompt that were not found in the prefix cache."""
        self._missed[cause].inc(tokens)

    def succeeded(self, times: RequestTimes, generated_tokens: int) -> None:
        self._success.inc()
        self._total.observe(times.total)
        for phase, seconds in self._phases.items():
            seconds.observe(getattr(times, phase))
        self._generated_tokens.observe(generated_tokens)

    def answered(self, seconds: float, input_length: int) -> None:
        """Counts an answer to a request that generates nothing."""
        self._success.inc()
        self._total.observe(seconds)
        self._input_length.observe(input_length)


class BatchMetrics:
    """Counts what happens to batches, as the scheduler reports it.

    preempted: takes the number of requests that went back to the queue, because there were no KV slots left for older
    ones.
    """

    def __init__(self, made: _Registry) -> None:
        self.preempted = made.counter("tgi_batch_preemption_count", "Number of preemptions.").inc
        self._prefix_lookups = made.counter(
            "tgi_prefix_cache_lookup_tokens", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = made.counter("tgi_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.")
        self._speculated = made.counter("tgi_batch_speculated_tokens", "Draft tokens verified.")
        self._accepted = made.counter("tgi_batch_accepted_tokens", "Draft tokens accepted.")
        self._concat = made.counter(
            "tgi_batch_concat", "Number of times waiting requests joined the running batch.", "reason"
        )
        self._next_size = made.requests("tgi_batch_next_size", "Number of requests that left the queue together.")
        self._count = made.counter("tgi_batch_inference_count", "Calls to the shards.", "method")
        self._success = made.counter("tgi_batch_inference_success", "Calls to the shards that succeeded.", "method")
        self._inference = made.seconds(
            "tgi_batch_inference_duration", "Round-trip time of a call to the shards.", "method"
        )
        self._forward = made.seconds(
            "tgi_batch_forward_duration", "Time of the forward pass, as reported by the shard.", "method"
        )
        self._decode = made.seconds(
            "tgi_batch_decode_duration", "Time to sample the next tokens, as reported by the shard.", "method"
        )
        self._filter = made.seconds(
            "tgi_batch_filter_duration", "Time to remove finished requests from the batch.", "method"
        )
        for each in (self._count, self._success, self._inference, self._forward, self._decode, self._filter):
            for method in Method:  # shown from the start
                each.labels(method.value)

    def looked_up(self, tokens: int, hits: int) -> None:
        """Counts a prompt's tokens that were looked up in the prefix cache, and how many were found."""
        self._prefix_lookups.inc(tokens)
        self._prefix_hits.inc(hits)

    def speculated(self, drafted: int, accepted: int) -> None:
        """Counts the drafted tokens that a step computed, and how many were right."""
        self._speculated.inc(drafted)
        self._accepted.inc(accepted)

    def admitted(self, requests: int, concat: ConcatReason | None) -> None:
        """Counts requests that left the queue together; `concat` is None when no batch was running."""
        self._next_size.observe(requests)
        if concat is not None:
            self._concat.labels(concat.value).inc()

    def called(self, method: Method) -> None:
        self._count.labels(method.value).inc()

    def answered(self, method: Method, inference: float, forward: float, decode: float) -> None:
        """Notes a call that took `inference` seconds; `forward` and `decode` are the shard's own timings."""
        self._success.labels(method.value).inc()
        self._inference.labels(method.value).observe(inference)
        self._forward.labels(method.value).observe(forward)
        self._decode.labels(method.value).observe(decode)

    def filtered(self, method: Method, seconds: float) -> None:
        self._filter.labels(method.value).observe(seconds)


class PrefixDiskMetrics:
    """Cached prefixes on disk (`--prefix-cache-disk`).

    held: takes the bytes of all files. stored, hit: take tokens that were written or read. loaded: takes the seconds
    that shards read.
    """

    def __init__(self, made: _Registry) -> None:
        self.held = made.gauge("tgi_prefix_disk_bytes", "Bytes of the files with cached prefixes.").set
        self.stored = made.counter("tgi_prefix_disk_stored_tokens", "Tokens written to disk.").inc
        self.hit = made.counter(
            "tgi_prefix_disk_hit_tokens",
            "Prompt tokens read from disk; `tgi_prefix_cache_hit_tokens` counts them, too.",
        ).inc
        self.loaded = made.seconds(
            "tgi_prefix_disk_load_duration", "Time to read a prefix from disk, in the shard."
        ).observe
        self.failed = made.failures(
            "tgi_prefix_disk_failure",
            "Files that could not be written (store) or read (load), or that a request waited for too long (slow).",
        )


class SleepMetrics:
    """Sleep and waking of the model."""

    def __init__(self, made: _Registry) -> None:
        self._asleep = made.gauge("tgi_asleep", "1 while the model sleeps, else 0.").set
        self._released = made.gauge(
            "tgi_sleep_released_bytes", "Memory of all shards that the last sleep released."
        ).set
        self._slept = made.seconds("tgi_sleep_duration", "Time to put the model to sleep, once nothing runs.").observe
        self._woke = made.seconds("tgi_wake_duration", "Time to wake the model.").observe
        self._asleep(0)

    def slept(self, seconds: float, released: int) -> None:
        """released: bytes."""
        self._asleep(1)
        self._slept(seconds)
        self._released(released)

    def woke(self, seconds: float) -> None:
        self._asleep(0)
        self._woke(seconds)


class EarlyAnswerMetrics:
    """Answers that are generated before they are requested. generated, used: take numbers of tokens."""

    def __init__(self, made: _Registry) -> None:
        self.generated = made.counter(
            "tgi_early_answer_generated_tokens", "Tokens generated before they were requested (`answer_tokens`)."
        ).inc
        self.used = made.counter("tgi_early_answer_used_tokens", "Those of them that a request got.").inc


class ImageMetrics:
    """Images of requests, on their way from the request to the model.

    received: counts an image. decoded, encoded: take the seconds that it took.
    """

    def __init__(self, made: _Registry) -> None:
        self.received = made.counter("tgi_image_count", "Images in requests.").inc
        self._known = made.counter(
            "tgi_image_known_count", "Images in requests that had been decoded for another request."
        )
        self.failed = made.failures("tgi_image_failure", "Images that could not be used, by error type.")
        self._length = made.tokens("tgi_image_length", "Number of prompt tokens of an image.")
        self.decoded = made.seconds(
            "tgi_image_decode_duration",
            "Time to decode an image and run the image processor, including the wait for a free process.",
        ).observe
        self.encoded = made.seconds(
            "tgi_image_encode_duration", "Time for the shards to compute the features of an image."
        ).observe

    def processed(self, tokens: int, *, known: bool) -> None:
        """Counts an image and its tokens. known: it was not decoded for this request."""
        self._length.observe(tokens)
        if known:
            self._known.inc()


class LoadMetrics(Collector):
    """The queue, the running batch and the KV cache at the moment, under TGI's names and under vLLM's.

    By the latter, Kubernetes' inference gateways choose a server; the model server protocol of the Gateway API
    Inference Extension defines them.
    """

    def __init__(self) -> None:
        self.waiting = self.running = 0
        self.held_tokens = self.cached_tokens = self.capacity_tokens = self.block_size = 0
        self._adapters: tuple[str, str, str] | None = None
        self._changed_at = 0.0

    def adapters(self, most: int, ready: Iterable[str], waiting: Iterable[str]) -> None:
        """Notes the adapters in memory, their maximum number, `most`, and the adapters that requests wait for."""
        now = str(most), ",".join(sorted(ready)), ",".join(sorted(waiting))
        if now != self._adapters:
            self._adapters, self._changed_at = now, time()

    def collect(self) -> Iterator[Metric]:
        usage = self.held_tokens / self.capacity_tokens if self.capacity_tokens else 0.0
        waiting, running = "Requests that wait for a place in a batch.", "Requests in the running batch."
        used = "Fraction of the KV cache used by running requests, 0 to 1."
        for name, value, meaning in (
            ("tgi_queue_size", self.waiting, waiting),
            ("vllm:num_requests_waiting", self.waiting, waiting),
            ("tgi_batch_current_size", self.running, running),
            ("vllm:num_requests_running", self.running, running),
            ("tgi_batch_current_max_tokens", self.held_tokens, "KV-cache tokens held by the running batch."),
            ("tgi_kv_capacity_tokens", self.capacity_tokens, "Total size of the KV cache in tokens."),
            ("tgi_kv_cached_tokens", self.cached_tokens, "KV-cache tokens of cached prefixes that no request uses."),
            ("vllm:kv_cache_usage_perc", usage, used),
            ("vllm:gpu_cache_usage_perc", usage, f"{used} Older gateways read this name."),
        ):
            yield GaugeMetricFamily(name, meaning, value=value)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Block size in tokens and number of blocks, as labels; the value is 1.",
            labels=["block_size", "num_gpu_blocks"],
        )
        if self.block_size:
            config.add_metric([str(self.block_size), str(self.capacity_tokens // self.block_size)], 1)
        yield config
        adapters = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Maximum number of adapters, adapters in memory, and requested adapters, as labels; the value is "
            "the time of the last change.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        if self._adapters is not None:
            adapters.add_metric(self._adapters, self._changed_at)
        yield adapters


class Metrics:
    """All metrics of one router process, in a registry of their own.

    event_loop_lag: takes seconds. client_memory: takes the bytes held now. fallbacks: takes their number. shown: the
    collector that is exposed; with several models it has more than these metrics.
    """

    def __init__(self) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self.shown: Collector = self._registry
        made = _Registry(self._registry)
        self.requests = RequestMetrics(made)
        self.batches = BatchMetrics(made)
        self.images = ImageMetrics(made)
        self.prefixes = PrefixDiskMetrics(made)
        self.early_answers = EarlyAnswerMetrics(made)
        self.sleep = SleepMetrics(made)
        self.load = LoadMetrics()
        self._registry.register(self.load)
        self.event_loop_lag = made.seconds("tgi_event_loop_lag_seconds", "Event-loop lag in seconds.").observe
        self.fallbacks = made.gauge(
            "tgi_engine_fallbacks",
            "Number of parts of the model that run on a slower fallback; /info gives the reasons.",
        ).set
        self._broken_connections = made.counter(
            "tgi_connections_broken",
            "Connections that ended within a request or its response: closed by the client or by the server (time-out, "
            "limits), or malformed.",
            "by",
        )
        self.client_memory = made.gauge(
            "tgi_client_memory_bytes",
            "Memory held for clients in bytes, as `--max-client-memory` counts it; counted once a second.",
        ).set
        self._refused = made.counter(
            "tgi_requests_refused",
            "Requests without a valid API key, or from web pages of other sites, by error type.",
            "err",
        )
        self._registry.register(ProcessMetrics())
        self._writing = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None
        self._not_before = 0.0

    def connection_broken(self, by: str) -> None:
        self._broken_connections.labels(by).inc()

    def refused(self, error_type: str) -> None:
        self._refused.labels(error_type).inc()

    def described(self) -> list[Metric]:
        """Returns the metrics with their names, types and descriptions."""
        return list(self._registry.collect())

    def expose(self) -> bytes:
        """Returns the text of `/metrics` (Prometheus text format 0.0.4)."""
        return _TOTAL.sub(rb"\1", generate_latest(self.shown))

    async def exposed(self) -> bytes:
        """Returns the result of `expose`, from a thread. Calls that come while a text is written share the next one.

        Writing takes milliseconds, and any client may call, so writing is limited to a fifth of the time.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(self._write())
        return await asyncio.shield(self._next)

    async def _write(self) -> bytes:
        async with self._writing:
            await asyncio.sleep(self._not_before - perf_counter())
            self._next = None
            began = perf_counter()
            text = await asyncio.to_thread(self.expose)
            ended = perf_counter()
            self._not_before = ended + 4 * (ended - began)
            return text
