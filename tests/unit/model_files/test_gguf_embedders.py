"""Embedding models in GGUF files: their vectors are those of `transformers` with the same numbers."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from tests.gguf_encoders import write_embedder
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.encoders import Encoder
from tgi_server.model_files.errors import ModelUnavailable
from tgi_server.model_files.gguf_models import described
from tgi_server.router.text.tokenizer import tokenizer_of

TEXTS = ("the lazy egg boils", "Eggs, eggs!", "", "what is cooking?")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


class Text:
    def __init__(self, ids: list[int]) -> None:
        self.ids, self.second = ids, 0


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "quantized", "pooling"),
    [("bert", "Q8_0", "cls"), ("bert", "F32", "mean"), ("nomic_bert", "F16", "mean"), ("qwen3", "Q4_0", "lasttoken")],
)
def test_vectors_are_those_of_transformers(kind: str, quantized: str, pooling: str, tmp_path: Path) -> None:
    file, dense = write_embedder(kind, tmp_path, quantized, pooling=pooling)
    folder = described(file)
    tokenizer, expected_tokenizer = tokenizer_of(folder), Tokenizer.from_file(str(dense / "tokenizer.json"))
    encoder = Encoder("embed", EngineConfig(folder, device=torch.device("cpu")))
    model = AutoModel.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager").eval()
    assert encoder.info.pooling == pooling
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == expected_tokenizer.encode(text).ids
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        expected = {"cls": states[0], "mean": states.mean(0), "lasttoken": states[-1]}[pooling]
        torch.testing.assert_close(encoder.encode([Text(ids)])[0], expected, rtol=0, atol=1e-4)


def test_pairs_of_texts_have_their_types(tmp_path: Path) -> None:
    file, dense = write_embedder("bert", tmp_path)
    found = tokenizer_of(described(file)).encode("the egg", "lazy")
    expected = Tokenizer.from_file(str(dense / "tokenizer.json")).encode("the egg", "lazy")
    assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids)


def test_rerank_models_are_refused(tmp_path: Path) -> None:
    file, _ = write_embedder("bert", tmp_path, pooling="rank")
    with pytest.raises(ModelUnavailable, match="is a rerank model, which is not served from GGUF files"):
        described(file)
