"""Decisions, embeddings and rankings over gRPC: a real service, with a real model and with a stand-in."""

import json
import struct
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.conftest import ServerFactory
from tests.fakes.model_server import ModelServer
from tests.integration.llm_functionalities.service import Service, ask, running_service
from tests.servers import TextGenerationServer

INPUT = "How do I cook rice?"
PREDICATE = llm_pb2.DecisionQuestion(instructions="Is this about cooking?")
CHOICE = llm_pb2.DecisionQuestion(
    instructions="What is it about?",
    choices=[llm_pb2.DecisionOption(label="cooking"), llm_pb2.DecisionOption(label="DIY", description="wood")],
)
SCORE = llm_pb2.DecisionQuestion(
    instructions="How hard is it?", levels=[llm_pb2.DecisionOption(label=each) for each in ("easy", "hard")]
)


@pytest.fixture(scope="module")
def stand_in() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture(scope="module")
def service(stand_in: ModelServer) -> Iterator[Service]:
    with running_service("--endpoint", stand_in.url, "--default-timeout", "30") as service:
        yield service


@pytest.fixture
def channel(service: Service, stand_in: ModelServer) -> Iterator[grpc.Channel]:
    stand_in.raw, stand_in.raw_status = None, "200 OK"
    with service.channel() as channel:
        yield channel


def decide(channel: grpc.Channel, *questions: llm_pb2.DecisionQuestion, **more: Any) -> Any:
    request = llm_pb2.DecisionRequest(**{"input": INPUT, "questions": questions} | more)
    return llm_pb2_grpc.LLMDecisionsStub(channel).Decide(request)


def test_decisions_of_a_real_model(demo_server: TextGenerationServer) -> None:
    with running_service("--endpoint", demo_server.url) as service, service.channel() as channel:
        predicate, choice, score = decide(channel, PREDICATE, CHOICE, SCORE).answers
    body = {
        "input": INPUT,
        "questions": [
            {"type": "predicate", "instructions": PREDICATE.instructions},
            {
                "type": "choice",
                "instructions": CHOICE.instructions,
                "choices": [{"value": "cooking"}, {"value": "DIY", "description": "wood"}],
            },
            {"type": "score", "instructions": SCORE.instructions, "levels": [{"label": "easy"}, {"label": "hard"}]},
        ],
    }
    expected = httpx.post(f"{demo_server.url}/v1/decisions", json=body, timeout=60).json()["answers"]
    assert list(predicate.probabilities) == [expected[0]["probability"]]
    assert list(choice.probabilities) == [each["probability"] for each in expected[1]["probabilities"]]
    assert (choice.label, choice.confidence) == (expected[1]["choice"], expected[1]["confidence"])
    assert (score.score, score.label_mass) == (expected[2]["score"], expected[2]["label_mass"])


def test_embeddings_and_rankings_are_passed_on(channel: grpc.Channel, stand_in: ModelServer) -> None:
    stub = llm_pb2_grpc.LLMEmbeddingsStub(channel)
    stand_in.raw = json.dumps({"data": [{"embedding": [0.5, 0.25]}, {"embedding": [1.0, 0.0]}]}).encode()
    response = stub.Embed(llm_pb2.EmbedRequest(texts=["a", "b"], dimensions=2, prompt_name="query"))
    assert [list(each.values) for each in response.embeddings] == [[0.5, 0.25], [1.0, 0.0]]
    sent = stand_in.requests[-1]
    assert (sent.path, sent.body) == (
        "/v1/embeddings",
        {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 2, "prompt_name": "query"},
    )
    results = [{"index": 1, "relevance_score": 0.75}, {"index": 0, "relevance_score": 0.5}]
    stand_in.raw = json.dumps({"results": results}).encode()
    response = stub.Rerank(llm_pb2.RerankRequest(query="q", texts=["a", "b"]))
    assert [(each.index, each.score) for each in response.ranking] == [(1, 0.75), (0, 0.5)]
    assert stand_in.requests[-1].body == {"query": "q", "documents": ["a", "b"]}
    assert not stub.Embed(llm_pb2.EmbedRequest()).embeddings


def vectors(texts: list[str], columns: int, encoding: str) -> bytes:
    """Returns what a model server responds: for each text, its number in all columns."""
    rows: list[Any] = [[float(text) + 1 / 3] * columns for text in texts]
    if encoding == "base64":
        rows = [b64encode(struct.pack(f"<{columns}f", *row)).decode() for row in rows]
    return json.dumps({"data": [{"index": index, "embedding": row} for index, row in enumerate(rows)]}).encode()


@pytest.mark.parametrize(("count", "columns"), [(1, 3), (256, 2_048), (100, 8_192)])
def test_embeddings_of_many_texts_come_in_pieces(
    count: int, columns: int, channel: grpc.Channel, stand_in: ModelServer
) -> None:
    stand_in.raw = lambda body: vectors(body["input"], columns, body["encoding_format"])
    stub = llm_pb2_grpc.LLMEmbeddingsStub(channel)
    embeddings = stub.Embed(llm_pb2.EmbedRequest(texts=[str(place) for place in range(count)])).embeddings
    third = struct.unpack("f", struct.pack("f", 1 / 3))[0]
    assert [len(each.values) for each in embeddings] == [columns] * count
    assert [each.values[0] for each in embeddings] == pytest.approx([place + third for place in range(count)])


def test_a_response_that_is_too_large_concerns_no_other_call(
    channel: grpc.Channel, service: Service, stand_in: ModelServer
) -> None:
    stand_in.raw = b" " * (5 * 2**20)
    stub = llm_pb2_grpc.LLMEmbeddingsStub(channel)
    for _ in range(8):
        response, call = stub.Embed.with_call(llm_pb2.EmbedRequest(texts=["a"]))
        assert not response.embeddings
        assert dict(call.trailing_metadata())["empty-reason"] == "bad_answer"
    stand_in.raw = None
    with service.runner() as runner:
        assert ask(runner) == "a fine answer"


def test_embeddings_without_one_piece_are_empty(channel: grpc.Channel, stand_in: ModelServer) -> None:
    stand_in.raw = lambda body: vectors(body["input"], 2, "base64") if "0" in body["input"] else b"{}"
    stub = llm_pb2_grpc.LLMEmbeddingsStub(channel)
    assert not stub.Embed(llm_pb2.EmbedRequest(texts=[str(place) for place in range(100)])).embeddings


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b"[1",
        b'{"data": [{"embedding": ["x"]}], "results": [{"index": 7, "relevance_score": 1}], "answers": [{}]}',
        b'{"data": [], "results": [], "answers": []}',
        b'{"data": [{"embedding": "AAA"}]}',
        b'{"data": [{"embedding": "AAAAAAA="}]}',
    ],
)
def test_a_response_of_another_form_is_an_empty_one(raw: bytes, channel: grpc.Channel, stand_in: ModelServer) -> None:
    stand_in.raw = raw
    assert not decide(channel, PREDICATE).answers
    stub = llm_pb2_grpc.LLMEmbeddingsStub(channel)
    assert not stub.Embed(llm_pb2.EmbedRequest(texts=["a"])).embeddings
    response, call = stub.Rerank.with_call(llm_pb2.RerankRequest(query="q", texts=["a"]))
    assert not response.ranking
    assert dict(call.trailing_metadata())["empty-reason"] == "unusable"


@pytest.mark.parametrize("status", ["404 Not Found", "501 Not Implemented"])
def test_a_server_without_the_route_serves_other_calls(
    status: str, channel: grpc.Channel, service: Service, stand_in: ModelServer
) -> None:
    stand_in.raw, stand_in.raw_status = b"{}", status
    stub = llm_pb2_grpc.LLMEmbeddingsStub(channel)
    for _ in range(20):
        response, call = stub.Embed.with_call(llm_pb2.EmbedRequest(texts=["a"]))
        assert not response.embeddings
        assert dict(call.trailing_metadata())["empty-reason"] == "not_supported"
    stand_in.raw = None
    with service.runner() as runner:
        assert ask(runner) == "a fine answer"


@pytest.mark.slow
def test_without_a_model_responses_are_empty() -> None:
    with running_service() as service, service.channel() as channel:
        assert not decide(channel, PREDICATE).answers
        stub = llm_pb2_grpc.LLMEmbeddingsStub(channel)
        assert not stub.Embed(llm_pb2.EmbedRequest(texts=["a"])).embeddings


_LABEL = llm_pb2.DecisionOption(label="a")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"questions": []}, "`questions`"),
        ({"input": ""}, "`input`"),
        ({"questions": [llm_pb2.DecisionQuestion()]}, "`questions[0].instructions`"),
        ({"questions": [llm_pb2.DecisionQuestion(instructions="?", choices=[_LABEL])]}, "`questions[0].choices`"),
        ({"questions": [llm_pb2.DecisionQuestion(instructions="?", levels=[_LABEL] * 2)]}, "`questions[0].levels`"),
        ({"timeout": -1}, "`timeout`"),
    ],
)
def test_bad_questions_are_refused_by_the_name_of_the_field(
    changes: dict[str, Any], field: str, channel: grpc.Channel
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        decide(channel, **{"questions": [PREDICATE]} | changes)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in refused.value.details()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (llm_pb2.EmbedRequest(texts=["a", ""]), "`texts`"),
        (llm_pb2.EmbedRequest(texts=["a"], dimensions=-1), "`dimensions`"),
        (llm_pb2.RerankRequest(texts=["a"]), "`query`"),
    ],
)
def test_bad_texts_are_refused_by_the_name_of_the_field(request_: Any, field: str, channel: grpc.Channel) -> None:
    stub = llm_pb2_grpc.LLMEmbeddingsStub(channel)
    with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT") as refused:
        (stub.Embed if isinstance(request_, llm_pb2.EmbedRequest) else stub.Rerank)(request_)
    assert field in refused.value.details()


@pytest.mark.slow
def test_embeddings_of_a_real_model(server: ServerFactory, tmp_path: Path) -> None:
    from tests.tiny_encoders import make_embedder, make_ranker

    embedder, ranker = make_embedder("bert", tmp_path / "embedder"), make_ranker("bert", tmp_path / "ranker")
    url = server(f"--embedding-model-id={embedder}", f"--rerank-model-id={ranker}").wait_until_ready().url
    with running_service("--endpoint", url) as service, service.channel() as channel:
        stub = llm_pb2_grpc.LLMEmbeddingsStub(channel)
        response = stub.Embed(llm_pb2.EmbedRequest(texts=["oak", "dog"]))
        expected = httpx.post(f"{url}/embed", json={"inputs": ["oak", "dog"]}, timeout=60).json()
        assert [list(each.values) for each in response.embeddings] == [pytest.approx(each) for each in expected]
        ranking = stub.Rerank(llm_pb2.RerankRequest(query="oak", texts=["a tree", "a dog"])).ranking
        assert sorted(each.index for each in ranking) == [0, 1]
