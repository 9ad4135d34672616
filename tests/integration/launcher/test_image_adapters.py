"""Adapters of a model that reads images, in a whole server: at its start, at run time, and broken ones."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.adapters import make_adapter, rewrite
from tests.image_processors import save_processor, tokenizer_of
from tests.servers import TextGenerationServer
from tests.tiny_models import make_with_images

FAMILY = "qwen2_5_vl"
NEW = 200


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, an adapter of it, and copies of the adapter that are broken."""
    root = tmp_path_factory.mktemp("adapters")
    text = {"vocab_size": tokenizer_of(FAMILY).get_vocab_size(), "max_position_embeddings": 1024}
    folder = make_with_images(FAMILY, root / "model", torch.float32, text)
    save_processor(FAMILY, folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    make_adapter(model, root / "good", r=4, target_modules=r".*language_model.*(q_proj|down_proj)")
    make_adapter(model, root / "images", r=4, target_modules="all-linear")
    for name in ("unsupported", "cut", "other", "config"):
        shutil.copytree(root / "good", root / name)
    settings = json.loads((root / "good" / "adapter_config.json").read_text())
    (root / "unsupported" / "adapter_config.json").write_text(json.dumps(settings | {"use_mora": True}))
    (root / "config" / "adapter_config.json").write_text("[" * 100_000)
    weights = (root / "good" / "adapter_model.safetensors").read_bytes()
    (root / "cut" / "adapter_model.safetensors").write_bytes(weights[:-100])
    tensors = load_file(root / "good" / "adapter_model.safetensors")
    rewrite(root / "other", {name.replace("q_proj", "qq_proj"): tensor for name, tensor in tensors.items()})
    return root


@pytest.fixture(scope="module")
def server(root: Path, free_port: Any) -> Iterator[TextGenerationServer]:
    flags = (f"--model-id={root / 'model'}", "--dtype=float32", f"--lora-adapters=chef={root / 'good'}")
    updates = ("--allow-adapter-updates", f"--adapter-root={root}", "--api-key=secret")
    server = TextGenerationServer(free_port(), root / "server.log", *flags, *updates)
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


def client_of(server: TextGenerationServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": "Bearer secret"}, timeout=120)


def text(client: httpx.Client, **parameters: Any) -> str:
    body = {"inputs": "what is broken?", "parameters": {"max_new_tokens": 12, **parameters}}
    answer: str = client.post("/generate", json=body).raise_for_status().json()["generated_text"]
    return answer


@pytest.mark.slow
def test_adapters_answer_alike_from_the_start_and_at_run_time(server: TextGenerationServer) -> None:
    with client_of(server) as client:
        loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "second", "lora_path": "good"})
        assert loaded.status_code == 200, loaded.text
        base, chef, second = text(client), text(client, adapter_id="chef"), text(client, adapter_id="second")
    assert base != chef == second


@pytest.mark.slow
def test_broken_adapters_are_refused_with_the_reason_and_a_stream_beside_them_ends_whole(
    server: TextGenerationServer,
) -> None:
    reasons = {
        "unsupported": "use_mora",
        "images": "is of the part that reads images",
        "cut": "is corrupt or incomplete",
        "other": "is not a linear layer of the base model",
        "config": "adapter_config.json",
    }
    waiting = list(reasons)
    body = {"inputs": "what is broken?", "parameters": {"max_new_tokens": NEW, "ignore_eos_token": True}}
    tokens = 0
    with client_of(server) as client, client.stream("POST", "/generate_stream", json=body) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data:"):
                continue
            event = json.loads(line.removeprefix("data:"))
            assert "error" not in event, event
            tokens += 1
            if waiting:
                name = waiting.pop()
                with client_of(server) as other:
                    refused = other.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": name})
                assert refused.status_code == 400, (name, refused.text)
                assert reasons[name] in refused.json()["error"]["message"]
    assert tokens == NEW
    assert "Traceback" not in server.lines()
