"""docs/adapters.md as it stands: an adapter is trained, served beside the demo model, asked, loaded and unloaded."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.servers import TextGenerationServer

DOCUMENT = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text()
QUESTION = "How do I make a cheese cake?"


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the example has trained its adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    (training,) = examples("python")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(training, "docs/adapters.md", "exec"), {})
    return folder


@pytest.fixture(scope="module")
def running(folder: Path, free_port) -> Iterator[TextGenerationServer]:
    _, *flags = shlex.split(examples("sh")[0].replace("adapters/chef", f"{folder}/adapters/chef"))
    updates = ("--allow-adapter-updates", f"--adapter-root={folder}", "--api-key=secret")
    server = TextGenerationServer(free_port(), folder / "server.log", "--dtype=float32", *flags, *updates)
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def client(running: TextGenerationServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=running.url, headers=headers, timeout=60) as client:
        yield client


def asked(client: httpx.Client, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.slow
def test_the_example_answers_as_it_says(running: TextGenerationServer) -> None:
    command = examples("sh")[1].replace("http://127.0.0.1:3000", running.url)
    command = command.replace("curl", "curl -s -H 'Authorization: Bearer secret'", 1)
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(result.stdout)
    assert answer["model"] == "chef"
    assert answer["choices"][0]["message"]["content"].startswith("Yes, chef!")


@pytest.mark.slow
def test_requests_of_adapter_and_model_are_kept_apart(client: httpx.Client) -> None:
    for _ in range(2):  # the second time from the prefix cache
        assert asked(client, "chef").startswith("Yes, chef!")
        assert not asked(client, "tgi").startswith("Yes, chef!")
    body = {"inputs": QUESTION, "parameters": {"adapter_id": "chef", "max_new_tokens": 5}}
    assert client.post("/generate", json=body).status_code == 200
    assert [each["id"] for each in client.get("/info").json()["adapters"]] == ["chef"]
    assert 'tgi_request_adapter_count_total{adapter="chef"} ' in client.get("/metrics").text


@pytest.mark.slow
def test_an_adapter_comes_and_goes(client: httpx.Client) -> None:
    loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "second", "lora_path": "adapters/chef"})
    assert loaded.status_code == 200, loaded.text
    assert asked(client, "second").startswith("Yes, chef!")
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "second"}).status_code == 200
    missing = client.post("/v1/completions", json={"model": "second", "prompt": "a"})
    assert missing.status_code == 404
    foreign = httpx.post(f"{client.base_url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "x"})
    assert foreign.status_code == 401


@pytest.mark.slow
def test_an_adapter_that_does_not_fit_is_told_and_nothing_else_suffers(client: httpx.Client, folder: Path) -> None:
    other = folder / "adapters" / "other"
    other.mkdir()
    for file in (folder / "adapters" / "chef").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"modules_to_save": ["lm_head"]}))
    refused = client.post("/v1/load_lora_adapter", json={"lora_name": "other", "lora_path": "adapters/other"})
    assert (refused.status_code, "modules_to_save" in refused.json()["error"]["message"]) == (400, True)
    assert asked(client, "chef").startswith("Yes, chef!")


@pytest.mark.slow
def test_a_model_may_be_the_folder_of_an_adapter(folder: Path, free_port) -> None:
    flags = ("--dtype=float32", f"--model-id={folder}/adapters/chef", f"--huggingface-hub-cache={folder}/hub")
    server = TextGenerationServer(free_port(), folder / "merged.log", *flags)
    try:
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            assert asked(client, "tgi").startswith("Yes, chef!")
            assert client.get("/info").json()["model_id"] == "chef"
    finally:
        assert server.stop() == 0
