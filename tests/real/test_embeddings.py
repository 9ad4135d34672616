"""Vectors of all-MiniLM-L6-v2 are those of `transformers`, and a search with them finds paragraphs of the documents."""

import json
import re
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from oatmill import LLM
from tests.real.calls import post
from tests.real.conftest import RealServers
from tests.real.models import model_path
from tests.servers import TextGenerationServer

DOCS = Path(__file__).parents[2] / "docs"
SHORTEST = 200  # characters of a paragraph
TEXTS_AT_ONCE = 64
# What a user may ask, and words of the paragraph that answers it.
QUERIES = {
    "How are many fine-tuned LoRA variants of one base model served at once?": "One server serves many adapters",
    "What happens if more adapters are requested than fit?": "At most `--max-loras` (32) adapters are ready at once",
    "How is a JSON answer finished when there is little time left?": "It closes strings, lists and objects",
    "When is a request refused because it would be late anyway?": "a request that would surely miss its deadline",
    "How do several API keys share the server fairly?": "API keys get equal shares of the tokens",
    "Get the probability of yes or no without generating text": "answers questions about an input with probabilities",
    "What can the bundled example model be used for?": "A model for tests and first trials",
    "Which pooling is used for sentence vectors by default?": "pooling is the mean of all tokens",
    "How does the reranker compute its score?": "A rerank model is a sequence classifier",
    "How long are pictures cached after they have been processed?": "An image that was seen before costs little",
    "Which hosts may images be downloaded from?": "`--allowed-media-domains` takes a list",
    "How is randomness seeded, so that the same seed gives the same text?": "`SplitMix64(seed, step)`",
    "Which GGUF quantization should I download?": "Q4_K_M is the usual compromise",
    "Store the KV cache in 8 bits to save memory": "stores keys and values in 8 bits",
    "When does the circuit breaker open?": "The circuit of an endpoint opens",
}


@cache
def paragraphs() -> list[str]:
    """Returns the prose of all pages, without tables, lists, headings and code."""
    pages = (re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in DOCS.glob("*.md"))
    texts = (" ".join(text.split()) for page in pages for text in re.split(r"\n\s*\n", page))
    return sorted(text for text in texts if len(text) >= SHORTEST and text[0] not in "|#-<!")


@pytest.fixture(scope="module")
def server(real_server: RealServers) -> TextGenerationServer:
    return real_server("minilm", flag="--embedding-model-id")


def vectors(server: TextGenerationServer, texts: list[str]) -> torch.Tensor:
    """Returns the normalized vectors of texts, [texts, elements]."""
    found: list[list[float]] = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        body = {"inputs": texts[start : start + TEXTS_AT_ONCE], "truncate": True}
        found += post(server, "/embed", body)
    return torch.tensor(found)


def reference_vectors(texts: list[str]) -> torch.Tensor:
    """Returns what `transformers` computes, each text alone: the mean of the states of its tokens, normalized."""
    folder = model_path("minilm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    longest = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [
            model(**tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")).last_hidden_state[0]
            for text in texts
        ]
    return normalize(torch.stack([each.mean(dim=0) for each in states]))


def test_vectors_are_those_of_transformers(server: TextGenerationServer) -> None:
    scripts = json.loads(Path(__file__).with_name("scripts.json").read_text(encoding="utf-8"))
    texts = [*paragraphs()[:40], *(text for text in scripts.values() if text.strip())]
    found, expected = vectors(server, texts), reference_vectors(texts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_model_in_this_process_has_the_same_vectors() -> None:
    texts = [*paragraphs()[:20], *QUERIES]
    with LLM(model_path("minilm")) as llm:
        found = torch.from_numpy(llm.embed(texts, truncate_prompt_tokens=-1).copy())
    torch.testing.assert_close(found, reference_vectors(texts), rtol=0, atol=1e-4)


def test_openai_route_has_the_same_vectors(server: TextGenerationServer) -> None:
    texts = list(QUERIES)
    data = post(server, "/v1/embeddings", {"input": texts, "model": "minilm"})["data"]
    torch.testing.assert_close(
        torch.tensor([each["embedding"] for each in data]), vectors(server, texts), rtol=0, atol=1e-5
    )


def test_search_finds_the_paragraph(server: TextGenerationServer) -> None:
    """The paragraph that answers a question is among the five closest ones, and mostly the first or the second."""
    assert len(paragraphs()) >= 200
    scores = vectors(server, list(QUERIES)) @ vectors(server, paragraphs()).T  # [queries, paragraphs]
    ranks = {}
    for (query, words), row in zip(QUERIES.items(), scores, strict=True):
        order = [paragraphs()[place] for place in row.argsort(descending=True)]
        found = [rank for rank, text in enumerate(order, 1) if words in text]
        assert len(found) == 1, f"{len(found)} paragraphs have {words!r}"
        ranks[query] = found[0]
    assert all(rank <= 5 for rank in ranks.values()), ranks
    assert fmean(1 / rank for rank in ranks.values()) >= 0.6, ranks
