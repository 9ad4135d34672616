import re

from tgi_server.router.metrics import TGI_COUNTERS, ConcatReason, Method, Metrics, RequestTimes

COUNTERS = {
    "tgi_request_count": (),
    "tgi_request_success": (),
    "tgi_request_failure": ("err",),
    "tgi_batch_inference_count": ("method",),
    "tgi_batch_inference_success": ("method",),
    "tgi_batch_concat": ("reason",),
    "tgi_batch_preemption_count_total": (),
    "tgi_prefix_cache_hit_tokens_total": (),
    "tgi_batch_speculated_tokens_total": (),
    "tgi_batch_accepted_tokens_total": (),
    "tgi_prefix_cache_lookup_tokens_total": (),
    "tgi_image_count_total": (),
    "tgi_image_known_count_total": (),
    "tgi_image_failure_total": ("err",),
}
GAUGES = (
    "tgi_queue_size",
    "tgi_batch_current_size",
    "tgi_batch_current_max_tokens",
    "tgi_kv_capacity_tokens",
    "tgi_kv_cached_tokens",
    "tgi_engine_fallbacks",
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
)
HISTOGRAMS = {
    "tgi_request_duration": (),
    "tgi_request_validation_duration": (),
    "tgi_request_queue_duration": (),
    "tgi_request_inference_duration": (),
    "tgi_request_mean_time_per_token_duration": (),
    "tgi_request_input_length": (),
    "tgi_request_max_new_tokens": (),
    "tgi_request_generated_tokens": (),
    "tgi_request_skipped_tokens": (),
    "tgi_batch_next_size": (),
    "tgi_batch_inference_duration": ("method",),
    "tgi_batch_forward_duration": ("method",),
    "tgi_batch_decode_duration": ("method",),
    "tgi_batch_filter_duration": ("method",),
    "tgi_event_loop_lag_seconds": (),
    "tgi_image_length": (),
    "tgi_image_decode_duration": (),
    "tgi_image_encode_duration": (),
}


def samples(metrics: Metrics) -> dict[str, float]:
    """Returns the value of each series by the name under which it is exposed."""
    lines = (line for line in metrics.expose().decode().splitlines() if not line.startswith("#"))
    return {series: float(value) for series, value in (line.rsplit(" ", 1) for line in lines)}


def everything() -> Metrics:
    metrics = Metrics()
    metrics.requests.received()
    metrics.requests.validated(input_length=7, max_new_tokens=20)
    metrics.requests.accepted_drafts(3)
    metrics.requests.succeeded(RequestTimes(1.0, 0.1, 0.2, 0.7, 0.07, 0.4), generated_tokens=10)
    metrics.requests.failed("validation")
    metrics.load.waiting, metrics.load.running = 2, 3
    metrics.load.held_tokens, metrics.load.cached_tokens, metrics.load.capacity_tokens = 48, 20, 100
    metrics.batches.preempted(2)
    metrics.batches.looked_up(10, 4)
    metrics.batches.speculated(5, 2)
    metrics.batches.admitted(3, ConcatReason.BACKPRESSURE)
    metrics.batches.called(Method.PREFILL)
    metrics.batches.answered(Method.PREFILL, 0.5, 0.3, 0.1)
    metrics.batches.filtered(Method.DECODE, 0.01)
    metrics.images.received()
    metrics.images.processed(300, known=True)
    metrics.images.decoded(0.2)
    metrics.images.encoded(2.0)
    metrics.images.failed("validation")
    return metrics


def test_the_process_is_measured():
    shown = samples(Metrics())
    assert shown['process_resident_memory_bytes{process="router"}'] > 10_000_000
    assert shown['process_cpu_seconds_total{process="router"}'] > 0
    assert shown['process_open_fds{process="router"}'] > 0
    assert not any("shard" in name for name in shown)


def test_names_types_and_labels():
    text = everything().expose().decode()
    for name in COUNTERS:
        assert f"# TYPE {name} counter" in text
    for name in GAUGES:
        assert f"# TYPE {name} gauge" in text
    for name in HISTOGRAMS:
        assert f"# TYPE {name} histogram" in text
    assert {name for name in COUNTERS if not name.endswith("_total")} == TGI_COUNTERS
    assert not re.search(rf"^({'|'.join(TGI_COUNTERS)})_total", text, re.MULTILINE)
    assert "_created" not in text
    for name, labels in {**COUNTERS, **HISTOGRAMS}.items():
        series = re.search(rf"^{name}(?:_bucket)?(?:{{([^}}]*)}})? ", text, re.MULTILINE)
        assert series is not None, name
        assert {*re.findall(r"(\w+)=", series[1] or "")} - {"le"} == {*labels}, name


def test_values():
    values = samples(everything())
    assert values["tgi_request_count"] == 1
    assert values['tgi_request_failure{err="validation"}'] == 1
    assert values["tgi_queue_size"] == values["vllm:num_requests_waiting"] == 2
    assert values["vllm:num_requests_running"] == 3
    assert values["vllm:kv_cache_usage_perc"] == 0.48
    assert (values["tgi_batch_current_size"], values["tgi_batch_current_max_tokens"]) == (3, 48)
    assert (values["tgi_kv_capacity_tokens"], values["tgi_kv_cached_tokens"]) == (100, 20)
    assert (values["tgi_prefix_cache_lookup_tokens_total"], values["tgi_prefix_cache_hit_tokens_total"]) == (10, 4)
    assert (values["tgi_batch_speculated_tokens_total"], values["tgi_batch_accepted_tokens_total"]) == (5, 2)
    assert values["tgi_batch_preemption_count_total"] == 2
    assert values['tgi_batch_concat{reason="backpressure"}'] == 1
    assert values["tgi_request_duration_sum"] == 1.0
    assert values["tgi_request_generated_tokens_sum"] == 10
    assert values['tgi_batch_forward_duration_sum{method="prefill"}'] == 0.3


def test_gateways_learn_which_adapters_are_in_memory():
    metrics = Metrics()
    assert "vllm:lora_requests_info{" not in metrics.expose().decode()
    labels = 'max_lora="8",running_lora_adapters="a,b",waiting_lora_adapters="c"'
    metrics.load.adapters(8, ["b", "a"], {"c"})
    first = samples(metrics)[f"vllm:lora_requests_info{{{labels}}}"]
    metrics.load.adapters(8, ["b", "a"], {"c"})
    assert samples(metrics)[f"vllm:lora_requests_info{{{labels}}}"] == first > 1e9
    metrics.load.adapters(8, ["a"], ())
    assert sum(series.startswith("vllm:lora_requests_info{") for series in samples(metrics)) == 1


def test_a_first_batch_joins_none():
    metrics = Metrics()
    metrics.batches.preempted(2)
    metrics.batches.looked_up(10, 4)
    metrics.batches.speculated(5, 2)
    metrics.batches.admitted(3, None)
    assert "tgi_batch_concat{" not in metrics.expose().decode()


def test_durations_have_buckets_from_a_tenth_of_a_millisecond_to_minutes():
    bounds = [
        float(bound)
        for bound in re.findall(r'tgi_request_duration_bucket{le="([\d.e-]+)"}', everything().expose().decode())
    ]
    assert bounds == sorted(bounds)
    assert bounds[0] <= 0.0001
    assert bounds[-1] >= 100


def test_two_routers_in_one_process_do_not_share_metrics():
    first, second = Metrics(), Metrics()
    first.requests.received()
    assert samples(second)["tgi_request_count"] == 0
