"""One trace from the caller through llm_functionalities and the router to the shard, over real processes."""

from collections.abc import Iterator

import httpx
import pytest

from shared.stubs import llm_pb2
from tests.collector import Collector, running_collector
from tests.conftest import ServerFactory
from tests.integration.llm_functionalities.service import running_service

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.mark.slow
def test_a_trace_goes_through_all_services(server: ServerFactory, collector: Collector) -> None:
    tracing = f"--otlp-endpoint={collector.endpoint}"
    model = server(tracing, "--dtype=float32").wait_until_ready()
    with running_service(f"--endpoint={model.url}", tracing) as front, front.runner() as runner:
        request = llm_pb2.ModelRequest(formatted_prompt="Say hello.", max_tokens=3, timeout=20_000)
        assert runner.call_model(request, metadata=[("traceparent", TRACEPARENT)]).text
    model.generate("Say hello.", max_new_tokens=3)
    _leave_early(model.url)
    assert model.stop() == 0

    ours = [span for span in collector.spans if span.trace == TRACE]
    by_name = {span.name: span for span in ours}
    assert len(ours) == len(by_name)
    assert {span.name: span.service for span in ours} == {
        "LLMRunner/call_model": "llm_functionalities",
        "/generate": "text-generation-inference.router",
        **dict.fromkeys(("validation", "queue", "inference"), "text-generation-inference.router"),
        **dict.fromkeys(("prefill", "decode"), "text-generation-inference.server"),
    }
    call, whole, prefill, decode = (
        by_name[name] for name in ("LLMRunner/call_model", "/generate", "prefill", "decode")
    )
    assert (call.parent, whole.parent, prefill.parent, decode.parent) == (CALLER, call.id, whole.id, whole.id)
    assert call.start <= whole.start <= prefill.start <= prefill.end <= decode.start <= decode.end <= whole.end
    prompt = int(whole.attributes["prompt_tokens"])
    assert whole.attributes["gen_ai.operation.name"] == "text_completion"
    assert whole.attributes["gen_ai.request.model"] == whole.attributes["gen_ai.response.model"]
    usage = [whole.attributes[f"gen_ai.usage.{kind}_tokens"] for kind in ("input", "output")]
    assert (usage, whole.attributes["gen_ai.request.max_tokens"]) == ([prompt, 3], 3)
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert prefill.attributes == {"rank": 0, "prompt_tokens": prompt, "cached_tokens": 0, "batch_size": 1}
    assert decode.attributes == {
        "rank": 0,
        "generated_tokens": 3,
        "steps": 2,
        "mean_batch_size": 1.0,
        "finish_reason": "length",
    }

    _, again, left = (span for span in collector.spans if span.name == "prefill")
    assert again.attributes["cached_tokens"] > 0
    assert len({TRACE, again.trace, left.trace}) == 3
    (cancelled,) = (span for span in collector.spans if span.name == "decode" and span.trace == left.trace)
    assert "finish_reason" not in cancelled.attributes
    assert cancelled.error is None


def _leave_early(url: str) -> None:
    body = {"inputs": "Tell me a story.", "parameters": {"max_new_tokens": 400, "ignore_eos": True}}
    with httpx.stream("POST", f"{url}/generate_stream", json=body, timeout=30) as answer:
        next(answer.iter_lines())
