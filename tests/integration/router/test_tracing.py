"""Spans reach an OpenTelemetry collector, in the caller's trace."""

import httpx

from tests.collector import running_collector
from tests.integration.router.process import Start

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_spans_of_a_request(start: Start, flags: tuple[str, list[str]]):
    url, arguments = flags
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}
    with running_collector() as collector:
        tracing = (f"--otlp-endpoint={collector.endpoint}", "--otlp-service-name=the-router")
        process = start(*arguments, *tracing).until_ready(url)
        assert httpx.post(f"{url}/generate", json=body, headers=headers, timeout=30).status_code == 200
        httpx.post(f"{url}/generate_stream", json={"inputs": ""}, headers=headers, timeout=30)
        process.popen.terminate()
        assert process.wait() == 0
    assert {span.service for span in collector.spans} == {"the-router"}
    whole = collector.named("/generate")
    assert (whole.trace, whole.parent) == (TRACE, CALLER)
    assert whole.attributes["generated_tokens"] == 3
    for name in ("validation", "queue", "inference"):
        part = collector.named(name)
        assert part.parent == whole.id
        assert part.start <= part.end
        assert abs(part.start - whole.start) < 10e9
    assert "must not be empty" in str(collector.named("/generate_stream").error)
