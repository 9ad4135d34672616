"""Adapters: named by requests, listed, counted, loaded and unloaded."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.router_service import RouterService
from tgi_server.router.service import RequestPolicy

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def router() -> RouterService:
    router = RouterService()
    await router.service.adapters.add("chef", "/adapters/chef")
    await router.service.adapters.add("diy", "/adapters/diy")
    return router


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of adapters, and one beside it."""
    for place in ("root/cook", "root/deep/cook", "root/broken", "elsewhere"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "adapter_config.json").write_text("{}")
    (tmp_path / "root/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/empty").mkdir()
    (tmp_path / "root/gguf").mkdir()
    (tmp_path / "root/gguf/chef.gguf").touch()
    (tmp_path / "elsewhere/out.gguf").touch()
    (tmp_path / "root/out.gguf").symlink_to(tmp_path / "elsewhere/out.gguf")
    (tmp_path / "root/outside").mkdir()
    (tmp_path / "root/outside/out.gguf").symlink_to(tmp_path / "elsewhere/out.gguf")
    (tmp_path / "root/several").mkdir()
    for name in "ab":
        (tmp_path / f"root/several/{name}.gguf").touch()
    return tmp_path / "root"


@pytest.fixture
async def updatable(root: Path) -> AsyncIterator[tuple[RouterService, httpx.AsyncClient]]:
    router = RouterService(policy=RequestPolicy(10_000, 1, 10, adapter_root=root))
    async with router.client() as client:
        yield router, client


GENERATE = {"inputs": "hello", "parameters": {"adapter_id": "chef"}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", GENERATE),
    ("/generate_stream", GENERATE),
    ("/", GENERATE),
    ("/invocations", GENERATE),
    ("/vertex", {"instances": [GENERATE]}),
    ("/vertex", {"instances": [CHAT | {"model": "chef"}]}),
    ("/v1/completions", {"prompt": "hello", "model": "chef"}),
    ("/v1/chat/completions", CHAT | {"model": "chef"}),
    ("/invocations", CHAT | {"model": "chef"}),
    ("/v1/responses", {"input": "hello", "model": "chef"}),
]


async def test_every_route_hands_the_adapter_to_the_scheduler(
    router: RouterService, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    for path, body in REQUESTS:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        assert router.scheduler.submitted.pop().options.adapter_id == "chef", path
        if path.startswith("/v1"):
            assert response.json()["model"] == "chef"
    answered = [vars(record) for record in caplog.records if record.message.endswith("answered")]
    assert [(each["model"], each["adapter"]) for each in answered] == [("maker/model", "chef")] * len(REQUESTS)
    assert f'tgi_request_adapter_count_total{{adapter="chef"}} {len(REQUESTS)}.0' in (await client.get("/metrics")).text


async def test_the_model_itself_has_names_too(router: RouterService, client: httpx.AsyncClient):
    for model in (None, "", "tgi", "maker/model"):
        response = await client.post("/v1/chat/completions", json=CHAT | {"model": model})
        assert response.json()["model"] == "maker/model"
        assert router.scheduler.submitted.pop().options.adapter_id is None
    assert 'tgi_request_adapter_count_total{adapter=""} 4.0' in (await client.get("/metrics")).text


async def test_an_adapter_that_is_not_there_is_told_with_those_that_are(
    router: RouterService, client: httpx.AsyncClient
):
    told = await client.post("/generate", json={"inputs": "hello", "parameters": {"adapter_id": "poet"}})
    assert (told.status_code, told.json()["error_type"]) == (422, "validation")
    assert "there is no adapter 'poet' on this server; it has 'chef', 'diy'" in told.json()["error"]
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "a"}), ("responses", {"input": "a"})):
        told = await client.post(f"/v1/{path}", json=body | {"model": "poet"})
        assert (told.status_code, told.json()["error"]["code"]) == (404, "model_not_found")
        assert told.json()["error"]["message"] == (
            "there is no model 'poet' here; there are 'maker/model', 'chef', 'diy'"
        )
    assert router.scheduler.submitted == []


async def test_a_server_without_adapters_takes_any_name_of_a_model():
    router = RouterService()
    async with router.client() as client:
        assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "gpt-4"})).status_code == 200
        told = await client.post("/generate", json={"inputs": "hello", "parameters": {"adapter_id": "x"}})
        assert told.status_code == 422
        assert told.json()["error"].endswith("there is no adapter 'x' on this server; it has none")


async def test_adapters_are_listed(client: httpx.AsyncClient):
    models = {each["id"]: each["parent"] for each in (await client.get("/v1/models")).json()["data"]}
    assert models == {"maker/model": None, "chef": "maker/model", "diy": "maker/model"}
    assert (await client.get("/v1/models/chef")).json()["parent"] == "maker/model"
    adapters = (await client.get("/info")).json()["adapters"]
    assert adapters == [{"id": "chef", "rank": 4, "ready": True}, {"id": "diy", "rank": 4, "ready": True}]


async def test_adapters_come_and_go(updatable: tuple[RouterService, httpx.AsyncClient], root: Path):
    router, client = updatable
    for name, path in (("cook", "cook"), ("deep cook", "deep/cook"), ("whole", str(root / "cook"))):
        loaded = await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        assert (loaded.status_code, loaded.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    assert [each.id for each in router.service.adapters] == ["cook", "deep cook", "whole"]
    assert (await client.post("/v1/completions", json={"prompt": "a", "model": "cook"})).json()["model"] == "cook"
    gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "cook"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'cook' removed successfully.")
    assert (await client.post("/v1/completions", json={"prompt": "a", "model": "cook"})).status_code == 404
    again = await client.post("/v1/unload_lora_adapter", json={"lora_name": "cook"})
    assert (again.status_code, again.json()["error"]["code"]) == (404, "model_not_found")


async def test_adapters_may_be_gguf_files(updatable: tuple[RouterService, httpx.AsyncClient], root: Path):
    router, client = updatable
    for name, path in (("file", "gguf/chef.gguf"), ("folder", "gguf")):
        loaded = await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        assert loaded.status_code == 200, loaded.text
    assert [each.folder for each in router.service.adapters] == [str(root / "gguf/chef.gguf")] * 2


NOT_BELOW = "is not the folder or the GGUF file of an adapter below"


async def test_what_may_not_be_loaded(updatable: tuple[RouterService, httpx.AsyncClient], root: Path):
    router, client = updatable
    await router.service.adapters.add("taken", "/adapters/taken")
    router.adapter_shards.broken.add(str(root / "broken"))
    for name, path, told in (
        ("x", "../elsewhere", NOT_BELOW),
        ("x", "/etc", NOT_BELOW),
        ("x", "link", NOT_BELOW),
        ("x", "absent", NOT_BELOW),
        ("x", "empty", NOT_BELOW),
        ("x", "a\0b", NOT_BELOW),
        ("x", "absent.gguf", NOT_BELOW),
        ("x", "out.gguf", NOT_BELOW),
        ("x", "outside", NOT_BELOW),
        ("x", "several", "several has several GGUF files; name one of them: a.gguf, b.gguf"),
        ("x", "broken", "broken has no adapter_config.json"),
        ("maker/model", "cook", "is a name of the model itself"),
        (" ", "cook", "an adapter's id has 1 to 256 printable characters"),
        ("taken", "cook", "there is an adapter 'taken' already"),
    ):
        refused = await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        assert refused.status_code == 400
        assert told in refused.json()["error"]["message"]
        assert [each.id for each in router.service.adapters] == ["taken"]
    body = {"lora_name": "x", "lora_path": "cook", "load_inplace": True}
    refused = await client.post("/v1/load_lora_adapter", json=body)
    assert "`load_inplace` is not supported" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["load_lora_adapter", "unload_lora_adapter"])
async def test_adapters_stay_as_they_are_unless_the_server_allows_updates(
    router: RouterService, client: httpx.AsyncClient, path: str
):
    refused = await client.post(f"/v1/{path}", json={"lora_name": "chef", "lora_path": "chef"})
    assert refused.status_code == 403
    assert "without --allow-adapter-updates" in refused.json()["error"]["message"]
    assert [each.id for each in router.service.adapters] == ["chef", "diy"]


async def test_metrics_have_a_bounded_number_of_adapters(router: RouterService, client: httpx.AsyncClient):
    for number in range(300):
        router.service.metrics.requests.computed_by(f"adapter {number}")
    told = [line for line in (await client.get("/metrics")).text.splitlines() if "adapter_count_total{" in line]
    assert len(told) == 257
    assert 'tgi_request_adapter_count_total{adapter="_other"} 44.0' in told
