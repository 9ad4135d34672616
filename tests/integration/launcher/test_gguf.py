"""A GGUF file is served as a model in transformers format is, with its tokenizer and its chat template."""

from pathlib import Path

import httpx
import pytest

from tests.conftest import ServerFactory
from tests.gguf_models import make_gguf
from tests.tiny_models import make_llama


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_gguf_file_gives_the_tokens_of_its_dense_weights(server: ServerFactory, tmp_path: Path, shards: int) -> None:
    file, dense = make_gguf(make_llama(tmp_path / "llama"), tmp_path / "files", "Q8_0")
    cache = f"--huggingface-hub-cache={tmp_path / 'cache'}"
    plain = server(f"--model-id={dense}", "--dtype=float32").wait_until_ready()
    expected = plain.generate("the quick brown fox", max_new_tokens=20)
    assert plain.stop() == 0
    running = server(f"--model-id={file}", "--dtype=float32", f"--num-shard={shards}", cache).wait_until_ready()
    assert running.generate("the quick brown fox", max_new_tokens=20) == expected
    info = httpx.get(f"{running.url}/info").json()
    assert (info["model_id"], info["quantization"]) == (file.name, "GGUF, Q8_0")
    body = {"messages": [{"role": "user", "content": "the lazy dog"}], "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] > 1  # the template is that of the file
    assert running.stop() == 0


@pytest.mark.slow
def test_what_a_file_is_not_served_for_is_one_line(server: ServerFactory, tmp_path: Path) -> None:
    file, _ = make_gguf(make_llama(tmp_path / "llama"), tmp_path / "files", "Q8_0")
    file.write_bytes(file.read_bytes()[:-1000])
    running = server(f"--model-id={file}", f"--huggingface-hub-cache={tmp_path / 'cache'}")
    assert running.wait() == 1
    assert "llama.gguf is incomplete from tensor" in running.lines()
    assert "Traceback" not in running.lines()
