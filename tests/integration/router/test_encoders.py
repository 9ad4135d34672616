"""Embeddings, ranking and classification over HTTP: a server with three models, by real clients."""

import base64
import math
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from huggingface_hub import InferenceClient
from tokenizers import Tokenizer

from tests.conftest import FreePort, ServerFactory
from tests.gguf_encoders import write_embedder
from tests.servers import TextGenerationServer
from tests.tiny_encoders import MOST_TOKENS, make_embedder, make_ranker, make_yes_or_no_ranker
from tgi_server.contract import Task
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.encoders import Encoder

QUERY, TEXTS = "a lazy dog", ["the dog rests", "an old oak", "", "quick brown fox " * 3]


class Reference:
    """A model, encoded one text at a time."""

    def __init__(self, task: Task, folder: Path) -> None:
        self._encoder = Encoder(task, EngineConfig(folder, device=torch.device("cpu"), custom_kernels=False))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def __call__(self, *texts: str) -> list[float]:
        """The values of a text, or of a pair."""
        encoding = self.tokenizer.encode(*texts)
        return self.of_tokens(encoding.ids, encoding.type_ids.index(1) if 1 in encoding.type_ids else 0)

    def of_tokens(self, token_ids: list[int], second_text: int = 0) -> list[float]:
        class Text:
            ids, second = token_ids, second_text

        values: list[float] = self._encoder.encode([Text()])[0].tolist()
        return values


class Models:
    def __init__(self, folder: Path, chat: Path) -> None:
        self.chat = chat
        self.embedder = make_embedder("bert", folder / "embedder", normalize=True)
        self.ranker = make_ranker("bert", folder / "ranker")
        self.embed, self.rank = Reference("embed", self.embedder), Reference("rank", self.ranker)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path) -> Models:
    return Models(tmp_path_factory.mktemp("models"), llama_folder)


@pytest.fixture(scope="module")
def url(models: Models, free_port: FreePort, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model that generates, one that embeds and one that ranks."""
    flags = [f"--model-id={models.chat}", f"--embedding-model-id={models.embedder}"]
    log = tmp_path_factory.mktemp("server") / "server.log"
    server = TextGenerationServer(free_port(), log, *flags, f"--rerank-model-id={models.ranker}")
    try:
        yield server.wait_until_ready().url
    finally:
        server.stop()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=60)


def unit(values: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def close(values: Any, expected: Any) -> bool:
    return values == pytest.approx(expected, abs=1e-4)


def test_openai_client_gets_embeddings_in_both_forms(client: openai.OpenAI, models: Models) -> None:
    texts = [TEXTS[0], TEXTS[1], TEXTS[3]]
    expected = [unit(models.embed(text)) for text in texts]
    # The client asks for base64 where nothing is said.
    for more in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model=str(models.embedder), input=texts, **more)
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert all(close(each.embedding, wanted) for each, wanted in zip(answer.data, expected, strict=True))
    tokens = sum(len(models.embed.tokenizer.encode(text).ids) for text in texts)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens


def test_base64_is_little_endian_float32(url: str, models: Models) -> None:
    answer = post(url, "/v1/embeddings", input="oak", encoding_format="base64").json()
    values = base64.b64decode(answer["data"][0]["embedding"])
    assert close(list(struct.unpack(f"<{len(values) // 4}f", values)), unit(models.embed("oak")))


def test_dimensions_are_the_first_ones_normalized(client: openai.OpenAI, models: Models) -> None:
    answer = client.embeddings.create(model=str(models.embedder), input="oak", dimensions=5)
    assert close(answer.data[0].embedding, unit(models.embed("oak")[:5]))


def test_tokens_are_taken_as_they_are(client: openai.OpenAI, models: Models) -> None:
    answer = client.embeddings.create(model=str(models.embedder), input=[[1, 40, 2], [1, 50, 60, 2]])
    assert close(answer.data[1].embedding, unit(models.embed.of_tokens([1, 50, 60, 2])))
    answer = client.embeddings.create(model=str(models.embedder), input=[1, 40, 2])
    assert close(answer.data[0].embedding, unit(models.embed.of_tokens([1, 40, 2])))


def test_embed_of_tei(url: str, models: Models) -> None:
    assert close(post(url, "/embed", inputs="oak").json(), [pytest.approx(unit(models.embed("oak")), abs=1e-4)])
    (raw,) = post(url, "/embed", inputs=["oak"], normalize=False).json()
    assert close(raw, models.embed("oak"))
    assert math.dist(raw, [0] * len(raw)) != pytest.approx(1)
    (prompted,) = post(url, "/embed", inputs=["oak"], prompt_name="query", normalize=False).json()
    assert close(prompted, models.embed("search: oak"))


def test_embed_of_ollama(url: str, models: Models) -> None:
    texts = [TEXTS[0], TEXTS[1]]
    answer = post(url, "/api/embed", model=f"{models.embedder.name}:latest", input=texts).json()
    assert answer["model"] == models.embedder.name
    for embedding, text in zip(answer["embeddings"], texts, strict=True):
        assert close(embedding, unit(models.embed(text)))
    assert answer["prompt_eval_count"] == sum(len(models.embed.tokenizer.encode(text).ids) for text in texts)
    (short,) = post(url, "/api/embed", model=str(models.embedder), input="oak", dimensions=5).json()["embeddings"]
    assert close(short, unit(models.embed("oak")[:5]))
    older = post(url, "/api/embeddings", model=str(models.embedder), prompt="oak").json()
    assert close(older["embedding"], models.embed("oak"))
    assert post(url, "/api/embed", model=str(models.embedder), input="").json()["embeddings"] == []


def test_models_of_ollama_have_the_bytes_of_their_weights(url: str, models: Models) -> None:
    sizes = {each["name"]: each["size"] for each in httpx.get(f"{url}/api/ps", timeout=60).json()["models"]}
    for folder in (models.embedder, models.ranker):
        assert sizes[folder.name] == sum(file.stat().st_size for file in folder.glob("*.safetensors")) > 0


def test_long_texts_are_cut_at_the_end_that_is_named(url: str, models: Models) -> None:
    long = "abcdefgh" * 40
    ids = models.embed.tokenizer.encode(long, add_special_tokens=False).ids
    for side, kept in (("right", ids[: MOST_TOKENS - 2]), ("Left", ids[2 - MOST_TOKENS :])):
        (values,) = post(url, "/embed", inputs=long, truncate=True, truncation_direction=side).json()
        assert close(values, unit(models.embed.of_tokens([1, *kept, 2])))


def test_rerank_of_tei(url: str, models: Models) -> None:
    ranks = post(url, "/rerank", query=QUERY, texts=TEXTS, return_text=True).json()
    assert [each["score"] for each in ranks] == sorted((each["score"] for each in ranks), reverse=True)
    for each in ranks:
        assert each["text"] == TEXTS[each["index"]]
        assert close(each["score"], sigmoid(models.rank(QUERY, each["text"])[0]))
    raw = post(url, "/rerank", query=QUERY, texts=TEXTS, raw_scores=True).json()
    assert all(close(each["score"], models.rank(QUERY, TEXTS[each["index"]])[0]) for each in raw)
    assert "text" not in raw[0]


@pytest.mark.parametrize(("path", "shown"), [("/rerank", True), ("/v1/rerank", True), ("/v2/rerank", False)])
def test_rerank_of_jina_and_cohere(path: str, shown: bool, url: str, models: Models) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[3]]
    answer = post(url, path, model=str(models.ranker), query=QUERY, documents=documents, top_n=2).json()
    assert len(answer["results"]) == 2
    texts = [TEXTS[0], TEXTS[1], TEXTS[3]]
    scores = [sigmoid(models.rank(QUERY, text)[0]) for text in texts]
    best = sorted(range(3), key=lambda each: -scores[each])[:2]
    assert [each["index"] for each in answer["results"]] == best
    assert all(close(each["relevance_score"], scores[each["index"]]) for each in answer["results"])
    assert all(("document" in each) == shown for each in answer["results"])
    assert answer["usage"]["total_tokens"] > 0
    assert answer["meta"]["api_version"]["version"] in ("1", "2")
    alone = post(url, path, query=QUERY, documents=TEXTS[1], texts=None).json()["results"]
    assert [each["index"] for each in alone] == [0]


def test_rerank_with_the_fields_of_both_forms_has_teis(url: str) -> None:
    answer = post(url, "/rerank", query=QUERY, texts=TEXTS, documents=TEXTS)
    assert [set(each) for each in answer.json()] == [{"index", "score"}] * len(TEXTS)
    assert "documents" in answer.headers["x-ignored-fields"]


def test_predict_of_tei(url: str, models: Models) -> None:
    assert close(post(url, "/predict", inputs="oak").json()[0]["score"], sigmoid(models.rank("oak")[0]))
    (pair,) = post(url, "/predict", inputs=["oak", "dog"], raw_scores=True).json()
    assert close(pair["score"], models.rank("oak", "dog")[0])
    both = post(url, "/predict", inputs=[["oak"], ["oak", "dog"]]).json()
    assert [len(each) for each in both] == [1, 1]


def test_models_are_listed_and_chosen(url: str, client: openai.OpenAI, models: Models) -> None:
    names = {each.id for each in client.models.list()}
    assert names == {models.chat.name, "embedder", "ranker"}
    with pytest.raises(openai.NotFoundError, match="is not the embedding model"):
        client.embeddings.create(model=models.chat.name, input="oak")
    with pytest.raises(openai.NotFoundError, match="generates no text"):
        client.completions.create(model="embedder", prompt="oak")
    assert client.completions.create(model=models.chat.name, prompt="oak", max_tokens=2).choices
    info = httpx.get(f"{url}/info").json()
    assert [each["task"] for each in info["encoders"]] == ["embed", "rank"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": [100_000]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "abcdefgh" * 40}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 49}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "nobody"}, "prompt_name"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "abcdefgh" * 40, "documents": ["a"]}, "query"),
        ("/v2/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v2/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v2/rerank", {"query": "a"}, "documents"),
        ("/v2/rerank", {"query": "abcdefgh" * 40, "documents": ["a"]}, "query"),
    ],
)
def test_bad_requests_get_400_that_names_the_field(path: str, body: dict[str, Any], field: str, url: str) -> None:
    answer = post(url, path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/embed", {"inputs": []}, "inputs"),
        ("/embed", {"inputs": "abcdefgh" * 40}, "inputs"),
        ("/rerank", {"query": "a", "texts": []}, "texts"),
        ("/rerank", {"query": "a", "texts": ["abcdefgh" * 40]}, "texts"),
        ("/rerank", {"query": "a", "texts": ["a"], "truncation_direction": "up"}, "truncation_direction"),
        ("/rerank", {"query": "a"}, "texts"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, "inputs"),
    ],
)
def test_bad_requests_of_tei_get_422_that_names_the_field(
    path: str, body: dict[str, Any], field: str, url: str
) -> None:
    answer = post(url, path, **body)
    assert answer.status_code == 422
    assert f"`{field}`" in answer.json()["error"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["folder", "file", "file with another tokenizer"])
def test_an_embedding_model_is_recognized(server: ServerFactory, tmp_path: Path, form: str) -> None:
    file, folder = write_embedder("bert", tmp_path, pooling="cls")
    disk = tmp_path / "prefixes"
    flags = [f"--model-id={folder if form == 'folder' else file}", f"--prefix-cache-disk=1GiB:{disk}"]
    if form == "file with another tokenizer":
        folder = shutil.copytree(folder, tmp_path / "other")
        tokenizer = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(tokenizer.replace('"lazy"', '"later"').replace('"the"', '"lazy"'))
        flags.append(f"--tokenizer-name={folder}")
    running = server(*flags).wait_until_ready()
    assert "--prefix-cache-disk has no effect" in running.lines()
    url = running.url
    expected = unit(Reference("embed", folder)("the lazy egg"))
    client = InferenceClient(url)
    assert client.feature_extraction("the lazy egg")[0].tolist() == pytest.approx(expected, abs=1e-4)
    assert client.feature_extraction("the lazy egg", truncate=True, normalize=True).shape == (1, 64)
    assert post(url, "/generate", inputs="the").status_code == 404


@pytest.mark.slow
def test_a_server_of_a_rerank_model_alone(server: ServerFactory, tmp_path: Path) -> None:
    folder = make_yes_or_no_ranker(tmp_path / "ranker")
    url = server(f"--rerank-model-id={folder}").wait_until_ready().url
    ranks = post(url, "/rerank", query="oak", texts=["the dog", "an oak"], instruction="Find trees.").json()
    reference = Reference("rank", folder)
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    prompt = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n<Instruct>: Find trees.\n<Query>: oak\n"
        "<Document>: an oak<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    ids = reference.tokenizer.encode(prompt, add_special_tokens=False).ids
    (score,) = [each["score"] for each in ranks if each["index"] == 1]
    assert close(score, sigmoid(reference.of_tokens(ids)[0]))
    refused = post(url, "/generate", inputs="oak")
    assert (refused.status_code, "without --model-id no route generates text" in refused.text) == (404, True)
    assert post(url, "/v1/embeddings", input="oak").status_code == 404
    assert post(url, "/predict", inputs="oak").status_code == 422
    assert httpx.get(f"{url}/info").json()["model_pipeline_tag"] == "text-ranking"
    assert httpx.get(f"{url}/health").status_code == 200
