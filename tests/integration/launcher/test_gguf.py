"""GGUF files are served as models in transformers format are, with all that requests may ask for."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, models

from tests.adapters import make_adapter
from tests.conftest import FreePort, ServerFactory
from tests.gguf_adapters import write_gguf_adapter
from tests.gguf_models import make_gguf
from tests.servers import TextGenerationServer
from tests.tiny_models import TOKENIZER_VOCAB_SIZE, make, make_llama, make_tokenizer
from tests.unit.engine.requests import load_reference

PROMPT = "the quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak, and then it"
NUMBER = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.2, "seed": 3},
    "json": {"grammar": {"type": "json", "value": NUMBER}},
    "expression": {"grammar": {"type": "regex", "value": "([a-z]{1,7} ){3}[0-9]"}},
    "adapter": {"adapter_id": "chef"},
    "adapter and expression": {"adapter_id": "chef", "grammar": {"type": "regex", "value": "[0-9]{3}"}},
}
REQUESTS = [(kind, PROMPT[:end]) for kind in KINDS for end in (20, 60, len(PROMPT))]


@dataclass(frozen=True)
class Files:
    """A model with tied embeddings in a GGUF file, and in a folder with the same numbers; an adapter in both forms."""

    file: Path
    dense: Path
    adapter: Path
    adapter_file: Path
    cache: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("gguf")
    model = make("llama", folder / "llama", vocab_size=TOKENIZER_VOCAB_SIZE, tie_word_embeddings=True)
    make_tokenizer().save(str(model / "tokenizer.json"))
    file, dense = make_gguf(model, folder / "files", "Q8_0")
    adapter, _ = make_adapter(load_reference(dense), folder / "chef", r=4, lora_alpha=8, target_modules=["q_proj"])
    return Files(file, dense, adapter, write_gguf_adapter(adapter, dense, folder / "chef.gguf"), folder / "cache")


def ask(server: TextGenerationServer) -> list[dict[str, Any]]:
    """Sends each request twice, eight at a time; the second time all prompts are in the prefix cache."""

    def one(request: tuple[str, str]) -> dict[str, Any]:
        kind, prompt = request
        return server.generate(prompt, **{"max_new_tokens": 30, "details": True} | KINDS[kind])

    with ThreadPoolExecutor(8) as clients:
        return [answer for _ in range(2) for answer in clients.map(one, REQUESTS)]


@pytest.fixture(scope="module")
def expected(files: Files, free_port: FreePort) -> list[list[int]]:
    """The tokens of the dense weights, with the adapter of peft."""
    flags = (f"--model-id={files.dense}", "--dtype=float32", f"--lora-adapters=chef={files.adapter}")
    server = TextGenerationServer(free_port(), files.cache.with_name("dense.log"), *flags)
    try:
        return tokens(ask(server.wait_until_ready()))
    finally:
        server.stop()


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [[token["id"] for token in answer["details"]["tokens"]] for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "adapter"),
    [
        ((), "peft"),
        ((), "gguf"),
        (("--num-shard=2",), "gguf"),
        (("--speculate=3",), "gguf"),
        (("--speculative-model={file}",), "gguf"),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_dense_weights(
    server: ServerFactory, files: Files, expected: list[list[int]], flags: tuple[str, ...], adapter: str
) -> None:
    place = files.adapter if adapter == "peft" else files.adapter_file
    running = server(
        *(f"--model-id={files.file}", "--dtype=float32", f"--huggingface-hub-cache={files.cache}"),
        *(f"--lora-adapters=chef={place}", *(flag.format(file=files.file) for flag in flags)),
    ).wait_until_ready()
    assert tokens(ask(running)) == expected
    info = httpx.get(f"{running.url}/info").json()
    assert (info["model_id"], info["quantization"]) == (files.file.name, "GGUF, Q8_0")
    assert [each["id"] for each in info["adapters"]] == ["chef"]
    (hits,) = re.findall(r"^tgi_prefix_cache_hit_tokens_total (\S+)", httpx.get(f"{running.url}/metrics").text, re.M)
    assert float(hits) > 0
    body = {"messages": [{"role": "user", "content": "the lazy dog"}], "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] > 1  # the template is that of the file
    assert running.stop() == 0


@pytest.mark.slow
def test_adapters_come_from_files_while_the_server_runs(
    server: ServerFactory, files: Files, expected: list[list[int]]
) -> None:
    flags = ("--allow-adapter-updates", f"--adapter-root={files.adapter_file.parent}", "--api-key=secret")
    running = server(f"--model-id={files.dense}", "--dtype=float32", *flags).wait_until_ready()
    with httpx.Client(base_url=running.url, headers={"Authorization": "Bearer secret"}, timeout=60) as client:
        loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "chef", "lora_path": "chef.gguf"})
        assert loaded.status_code == 200, loaded.text
        parameters = {"max_new_tokens": 30, "details": True, "adapter_id": "chef"}
        answer = client.post("/generate", json={"inputs": PROMPT, "parameters": parameters}).json()
        assert tokens([answer]) == [expected[REQUESTS.index(("adapter", PROMPT))]]


@pytest.mark.slow
def test_another_tokenizer_and_chat_template(server: ServerFactory, files: Files, tmp_path: Path) -> None:
    """Every character is a token, and the template says nothing but a word."""
    texts = ("<pad>", "<s>", "</s>", *" abcdefgh")
    tokenizer = Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(texts)}, merges=[]))
    tokenizer.add_special_tokens(list(texts[:3]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "chat_template.jinja").write_text("bad face")
    cache = f"--huggingface-hub-cache={files.cache}"
    for model in (files.file, files.dense):
        running = server(f"--model-id={model}", "--dtype=float32", f"--tokenizer-name={tmp_path}", cache)
        running.wait_until_ready()
        tokens = httpx.post(f"{running.url}/tokenize", json={"inputs": "a bad cab"}).json()
        assert [token["text"] for token in tokens] == list("a bad cab")
        body = {"messages": [{"role": "user", "content": "the lazy dog"}], "max_tokens": 3}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body).json()
        assert answer["usage"]["prompt_tokens"] == len("bad face")
        assert running.stop() == 0


@pytest.mark.slow
def test_what_a_file_is_not_served_for_is_one_line(server: ServerFactory, tmp_path: Path) -> None:
    file, _ = make_gguf(make_llama(tmp_path / "llama"), tmp_path / "files", "Q8_0")
    file.write_bytes(file.read_bytes()[:-1000])
    running = server(f"--model-id={file}", f"--huggingface-hub-cache={tmp_path / 'cache'}")
    assert running.wait() == 1
    assert "llama.gguf is incomplete from tensor" in running.lines()
    assert "Traceback" not in running.lines()
