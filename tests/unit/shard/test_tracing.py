"""The spans of requests in a shard's batch."""

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.engine.step import Generation
from tgi_server.shard.tracing import RequestSpans

TRACE, ROUTER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE}-{ROUTER}-01"}


class Traced:
    """spans: what traces the requests. ended: the spans that are over, with their attributes and errors."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = RequestSpans(provider.get_tracer("test"), rank=2)

    def ended(self) -> list[tuple[str, dict[str, Any], str | None]]:
        found = []
        for span in self._exporter.get_finished_spans():
            assert span.parent is not None
            assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, ROUTER)
            attributes = dict(span.attributes or {})
            assert attributes.pop("rank") == 2
            found.append((span.name, attributes, span.status.description))
        return found


@pytest.fixture
def traced() -> Traced:
    return Traced()


def request(request_id: int, **fields: Any) -> pb.Request:
    return pb.Request(id=request_id, input_ids=[1, 2, 3], trace_context=CONTEXT, **fields)


def test_a_request_from_its_first_token_to_its_last(traced: Traced) -> None:
    traced.spans.joining([request(7, cached_tokens=2)])
    traced.spans.stepped([], 1)
    assert traced.ended() == []
    traced.spans.stepped([Generation(7, 5)], 2)
    traced.spans.stepped([Generation(7, 5, jump_forward=[6, 8]), Generation(9, 4)], 4)
    traced.spans.stepped([Generation(7, 5, finish_reason=FinishReason.EOS_TOKEN)], 1)
    assert traced.ended() == [
        ("prefill", {"prompt_tokens": 3, "cached_tokens": 2, "batch_size": 2}, None),
        ("decode", {"generated_tokens": 5, "steps": 2, "mean_batch_size": 2.5, "finish_reason": "eos_token"}, None),
    ]


def test_a_step_that_gives_a_request_several_tokens_is_one_step(traced: Traced) -> None:
    traced.spans.joining([request(7)])
    traced.spans.stepped([Generation(7, 5), Generation(7, 6)], 2)
    traced.spans.stepped([Generation(7, 5), Generation(7, 6), Generation(7, 8, finish_reason=FinishReason.LENGTH)], 4)
    decode = traced.ended()[1][1]
    assert (decode["generated_tokens"], decode["steps"], decode["mean_batch_size"]) == (5, 1, 4)


def test_one_token_alone(traced: Traced) -> None:
    traced.spans.joining([request(7)])
    traced.spans.stepped([Generation(7, 5, finish_reason=FinishReason.LENGTH)], 1)
    assert [name for name, _, _ in traced.ended()] == ["prefill", "decode"]
    assert traced.ended()[1][1]["mean_batch_size"] == 0


def test_who_leaves_and_who_stays(traced: Traced) -> None:
    traced.spans.joining([request(1), request(2), request(3)])
    traced.spans.stepped([Generation(1, 5), Generation(2, 5)], 3)
    traced.spans.keep([2])
    assert [(name, error) for name, _, error in traced.ended()[2:]] == [("decode", None), ("prefill", None)]
    traced.spans.keep([], "out of memory")
    assert [(name, error) for name, _, error in traced.ended()[4:]] == [("decode", "out of memory")]


def test_a_request_that_comes_back_has_both_again(traced: Traced) -> None:
    for generated in ([], [5]):
        traced.spans.joining([request(1, generated_ids=generated)])
        traced.spans.stepped([Generation(1, 5)], 1)
        traced.spans.keep([])
    assert [attributes.get("prompt_tokens") for _, attributes, _ in traced.ended()] == [3, None, 4, None]


def test_an_error_of_one_request(traced: Traced) -> None:
    traced.spans.joining([request(1)])
    traced.spans.stepped([Generation(1, 5, error="the grammar is too complex")], 1)
    assert traced.ended()[1][2] == "the grammar is too complex"


def test_a_request_without_a_trace_has_no_spans(traced: Traced) -> None:
    traced.spans.joining([pb.Request(id=1, input_ids=[1])])
    traced.spans.stepped([Generation(1, 5, finish_reason=FinishReason.LENGTH)], 1)
    traced.spans.keep([])
    assert traced.ended() == []
