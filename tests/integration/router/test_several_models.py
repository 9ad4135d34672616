"""One router with several models: who is asked, who is awake, and what a model that is lost means for the others."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
from huggingface_hub import AsyncInferenceClient

from tests.fakes.instant_shard import InstantShard
from tests.fakes.instant_shard import start as start_shard
from tests.timing import SECONDS
from tgi_server import demo_model
from tgi_server.router.api.connections import Connections
from tgi_server.router.api.models_app import create_models_app
from tgi_server.router.api.server import HttpServer
from tgi_server.router.model_metrics import SeveralMetrics
from tgi_server.router.models import HostedModel, Models
from tgi_server.router.residency import Resident, State
from tgi_server.router.service import Service
from tgi_server.router.settings import RouterSettings
from tgi_server.router.startup import access_rules, assembled

EOS = 1
MB = 2**20


class Launcher:
    """Stands in for the launcher: shards without a model, which it starts when it is asked to."""

    def __init__(self, folder: Path, sleep_error: str) -> None:
        self.folder = folder
        self.sleep_error = sleep_error
        self.models: Models | None = None
        self.shards: dict[int, tuple[InstantShard, Any]] = {}
        self.texts: dict[int, list[int]] = {}
        self.encoders: dict[int, Path | None] = {}
        self.broken: set[int] = set()
        self._starting: set[asyncio.Task[None]] = set()

    def path(self, index: int) -> Path:
        return self.folder / f"shard-{index}"

    def load(self, index: int) -> None:
        task = asyncio.ensure_future(self._start(index))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, index: int) -> None:
        assert self.models is not None
        self.models.told(index, "loading", "")
        if index in self.broken:
            self.models.told(index, "failed", f"shard-{index} ended with exit code 1: /secret/small.gguf: no memory")
            return
        shard = InstantShard(
            f"unix://{self.path(index)}",
            self.texts[index],
            end=EOS,
            num_blocks=2_048,
            encoders=self.encoders.get(index),
            step_seconds=0.005,
        )
        shard.sleep_error = self.sleep_error
        self.shards[index] = shard, await start_shard(shard, self.path(index))
        self.models.told(index, "loaded", "")

    async def kill(self, index: int) -> None:
        """Ends a shard as if it had crashed."""
        _, server = self.shards.pop(index)
        await server.stop(0)
        self.path(index).unlink(missing_ok=True)
        assert self.models is not None
        self.models.told(index, "failed", f"shard-{index} was killed by SIGKILL")

    async def stop(self) -> None:
        for _, server in self.shards.values():
            await server.stop(None)


@dataclass
class Server:
    url: str
    http: httpx.AsyncClient
    models: Models
    launcher: Launcher

    def moves(self, name: str) -> list[str]:
        """How often a model fell asleep and woke."""
        return self.launcher.shards[self.models.models.index(self[name])][0].moves

    def __getitem__(self, name: str) -> HostedModel:
        model = self.models.find(name)
        assert model is not None
        return model

    async def complete(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"prompt": "How?", "max_tokens": 20, **body})

    async def text(self, **body: Any) -> str:
        response = await self.complete(**body)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text.strip()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.01)


Make = Callable[..., Awaitable[Server]]


@asynccontextmanager
async def running(
    folder: Path,
    residents: dict[str, Resident],
    most_bytes: int | None,
    *,
    sleep_error: str = "",
    encoder: int | None = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    """sleep_error: why models cannot sleep; empty: they can. encoder: the model that embeds."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    launcher = Launcher(folder, sleep_error)

    def own(index: int, name: str) -> RouterSettings:
        values: dict[str, Any] = {"tokenizer_name": demo_model.PATH, "allowed_hosts": ["*"], "model_id": name}
        values |= {"master_shard_uds_path": str(launcher.path(index)), "served_model_name": [name]}
        return RouterSettings.model_validate(values | settings)

    chosen = {name: own(index, name) for index, name in enumerate(residents)}
    hosted = [
        HostedModel([name], resident, "embed" if index == encoder else None)
        for index, (name, resident) in enumerate(residents.items())
    ]
    if encoder is not None:
        launcher.encoders[encoder] = demo_model.PATH

    def open_service(model: HostedModel) -> AbstractAsyncContextManager[Service]:
        return assembled(chosen[model.name], metrics=model.metrics)

    models = Models(hosted, most_bytes, open_service, launcher.load, 10)
    launcher.models = models
    for index, name in enumerate(residents):
        tokenizer = await asyncio.to_thread(_tokens, f"This is {name}.")
        launcher.texts[index] = [*tokenizer, EOS]
    shown = SeveralMetrics({model.name: model.metrics for model in hosted}, models.metrics)
    for model in hosted:
        model.metrics.shown = shown
    launcher.load(0)
    rules = access_rules(chosen[hosted[0].name], listener)
    app = create_models_app(models, rules, 2_000_000)
    server = HttpServer(app, grace=1, patience=60, connections=Connections(100, 100, 2**30))
    serving = asyncio.create_task(server.serve([listener]))
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        made = Server(url, http, models, launcher)
        try:
            await made.until(lambda: server.started and hosted[0].service is not None)
            yield made
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            for each in server.servers:
                each.close()
            await models.close()
            await launcher.stop()


def _tokens(text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = (
        Tokenizer.from_file(str(demo_model.PATH / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    )
    return ids


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        async def make(
            residents: dict[str, Resident] | None = None, most_bytes: int | None = None, **more: Any
        ) -> Server:
            found = residents or {name: Resident(name, MB, preload=True) for name in ("large", "small")}
            return await stack.enter_async_context(running(tmp_path, found, most_bytes, **more))

        yield make


@pytest.fixture
async def both(servers: Make) -> Server:
    server = await servers()
    await server.until(lambda: all(model.service for model in server.models.models))
    return server


async def test_a_request_is_answered_by_the_model_that_it_names(both: Server) -> None:
    assert await both.text(model="small") == "This is small."
    assert await both.text(model="large") == "This is large."
    assert await both.text() == "This is large."  # the default
    assert await both.text(model="tgi") == "This is large."
    response = await both.http.post("/generate?model=small", json={"inputs": "How?"})
    assert response.json()["generated_text"].strip() == "This is small."
    assert await both.text(path="/v1/completions?model=small", model="large") == "This is small."
    response = await both.http.post("/generate", json={"inputs": "How?", "parameters": {"adapter_id": "small"}})
    assert response.json()["generated_text"].strip() == "This is small."
    response = await both.http.post("/generate", json={"inputs": "How?", "parameters": {"adapter_id": "huge"}})
    assert response.status_code == 422


async def test_an_unknown_model_is_not_found(both: Server) -> None:
    response = await both.complete(model="huge")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert response.json()["error"]["message"] == "there is no model 'huge' here; there are 'large', 'small'"
    assert "x-request-id" in response.headers
    response = await both.http.post("/v1/embeddings", json={"input": "text", "model": "small"})
    assert response.json()["error"]["message"] == "'small' is not an embedding model; this server has none"
    assert (await both.http.get("/info?model=huge")).status_code == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"{", "the request is not JSON"), (b"[]", "should be an object"), (b'{"model": 3, "prompt": "a"}', "`model`")],
)
async def test_a_bad_body_is_refused_by_the_route(both: Server, body: bytes, message: str) -> None:
    response = await both.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_a_body_that_is_too_large_is_refused(servers: Make) -> None:
    server = await servers(payload_limit=3_000)
    response = await server.complete(prompt="a" * 4_000)
    assert response.status_code == 413
    response = await server.complete(prompt="a" * 2_000_000)
    assert response.status_code == 413


async def test_lists_have_all_models(both: Server) -> None:
    listed = (await both.http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["state"]) for each in listed] == [("large", "awake"), ("small", "awake")]
    assert (await both.http.get("/v1/models/small")).json()["id"] == "small"
    assert (await both.http.get("/info")).json()["model_id"] == "large"
    assert (await both.http.get("/info?model=small")).json()["model_id"] == "small"
    assert (await both.http.get("/info")).json()["models"] == ["large", "small"]
    tags = (await both.http.get("/api/tags")).json()["models"]
    assert [each["name"] for each in tags] == ["large", "small"]
    page = await both.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert [each["id"] for each in page.json()["data"]] == ["large", "small"]


async def test_metrics_have_the_model(both: Server) -> None:
    await both.text(model="small")
    lines = (await both.http.get("/metrics")).text.splitlines()
    assert 'tgi_request_count{model="small"} 1.0' in lines
    assert 'tgi_request_count{model="large"} 0.0' in lines
    assert 'tgi_model_awake{model="small"} 1.0' in lines
    assert len([line for line in lines if line.startswith("tgi_client_memory_bytes")]) == 1
    assert len([line for line in lines if line.startswith("# TYPE tgi_request_count ")]) == 1


async def test_clients_reach_both_models(both: Server) -> None:
    question: Any = [{"role": "user", "content": "How?"}]
    for name in ("large", "small"):
        async with openai.AsyncOpenAI(base_url=f"{both.url}/v1", api_key="unused") as client:
            answer = await client.chat.completions.create(model=name, messages=question)
            assert (answer.model, (answer.choices[0].message.content or "").strip()) == (name, f"This is {name}.")
        hugging_face = AsyncInferenceClient(base_url=both.url)
        said = await hugging_face.chat_completion(question, model=name)
        assert (said.choices[0].message.content or "").strip() == f"This is {name}."
        local = ollama.AsyncClient(host=both.url)
        reply = await local.chat(model=f"{name}:latest", messages=question)
        assert (reply.model, (reply.message.content or "").strip()) == (name, f"This is {name}.")
    assert [each.model for each in (await ollama.AsyncClient(host=both.url).list()).models] == ["large", "small"]


async def test_responses_continue_those_of_another_model(both: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{both.url}/v1", api_key="unused") as client:
        first = await client.responses.create(model="small", input="How?")
        assert (await client.responses.retrieve(first.id)).id == first.id
        second = await client.responses.create(model="large", input="Why?", previous_response_id=first.id)
        assert second.model == "large"


async def test_keys_are_needed_for_all_models(servers: Make) -> None:
    server = await servers(api_key="secret")
    assert (await server.complete(model="large")).status_code == 401
    assert (await server.complete(model="huge")).status_code == 401
    allowed = await server.http.post(
        "/v1/completions", json={"prompt": "a", "model": "large"}, headers={"authorization": "Bearer secret"}
    )
    assert allowed.status_code == 200


async def test_models_take_turns_in_memory_for_one(servers: Make) -> None:
    residents = {name: Resident(name, MB, preload=True) for name in ("large", "small")}
    server = await servers(residents, MB)
    await server.until(lambda: [each.state for each in server.models.models] == ["awake", "asleep"])
    assert await server.text(model="small") == "This is small."  # is loaded for it
    assert server.moves("large") == ["sleeps"]
    texts = await asyncio.gather(*(server.text(model=name) for name in ("large", "small") * 10))
    assert texts == [f"This is {name}." for name in ("large", "small") * 10]
    assert server.moves("large")[1] == "wakes"
    assert len(server.moves("large")) <= 4  # all that wait for a model are answered together
    listed = (await server.http.get("/v1/models")).json()["data"]
    assert sorted(each["state"] for each in listed) == ["asleep", "awake"]
    (awake,) = (await server.http.get("/api/ps")).json()["models"]
    assert awake["name"] in [each["id"] for each in listed if each["state"] == "awake"]
    lines = (await server.http.get("/metrics")).text
    assert 'tgi_wake_duration_count{model="large"} ' in lines


async def test_a_client_that_leaves_wakes_nothing_and_is_forgotten(servers: Make) -> None:
    residents = {"large": Resident("large", MB, preload=True), "small": Resident("small", MB)}
    server = await servers(residents, MB)
    server.launcher.shards[0][0].step_seconds = 0.05
    running = asyncio.create_task(server.text(model="large", max_tokens=10, ignore_eos=True))
    await server.until(lambda: bool(residents["large"].running))
    waiting = asyncio.create_task(server.complete(model="small"))
    await server.until(lambda: bool(residents["small"].waiting))
    waiting.cancel()
    await server.until(lambda: not residents["small"].waiting)
    await running
    assert server.moves("large") == []


async def test_what_cannot_be_in_time_is_refused_at_once(servers: Make) -> None:
    residents = {name: Resident(name, MB, preload=True) for name in ("large", "small")}
    server = await servers(residents, MB)
    await server.text(model="small")
    await server.text(model="large")
    residents["small"].wake_seconds = 30.0
    response = await server.complete(model="small", timeout_ms=2_000)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "deadline_unreachable")
    assert "retry-after" in response.headers


async def test_a_model_that_is_lost_is_an_error_of_its_own_requests_only(both: Server) -> None:
    small = both["small"].resident
    both.launcher.shards[1][0].step_seconds = 30.0
    running = asyncio.create_task(both.complete(model="small"))
    await both.until(lambda: bool(small.running))
    both.launcher.broken.add(1)
    await both.launcher.kill(1)
    assert (await running).status_code in (424, 503)
    refused = await both.complete(model="small")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
    assert "was killed by SIGKILL" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    metrics = (await both.http.get("/metrics")).text
    assert 'tgi_request_failure{err="model_unavailable",model="small"}' in metrics
    assert 'err="model_unavailable",model="large"' not in metrics
    assert await both.text(model="large") == "This is large."
    listed = (await both.http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["state"]) for each in listed] == [("large", "awake"), ("small", "failed")]
    assert listed[1]["reason"] == "shard-1 was killed by SIGKILL"
    assert (await both.http.get("/health")).status_code == 200

    small.retry_at = 0.0  # its time has come, and it still cannot be loaded
    refused = await both.complete(model="small")
    assert "exit code 1: small.gguf: no memory" in refused.json()["error"]["message"]  # without the server's folders
    both.launcher.broken.clear()
    small.retry_at = 0.0
    assert await both.text(model="small") == "This is small."
    assert small.state is State.AWAKE


async def test_the_default_model_may_be_lost_too(both: Server) -> None:
    both.launcher.broken.add(0)
    await both.launcher.kill(0)
    assert (await both.complete()).status_code == 503
    assert await both.text(model="small") == "This is small."
    assert (await both.http.get("/health")).status_code == 200
    assert (await both.http.get("/metrics")).status_code == 200


async def test_models_that_cannot_sleep_stay_awake(servers: Make) -> None:
    residents = {name: Resident(name, MB, preload=True) for name in ("large", "small")}
    server = await servers(residents, MB, sleep_error="no file for the weights")
    response = await server.complete(model="small")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "model_unavailable")
    assert "--models-memory" in response.json()["error"]["message"]


async def test_callers_put_models_to_sleep_and_wake_them(servers: Make) -> None:
    server = await servers(enable_sleep_mode=True)
    await server.until(lambda: all(model.service for model in server.models.models))
    (await server.http.post("/sleep?model=small")).raise_for_status()
    assert (await server.http.get("/is_sleeping?model=small")).json() == {"is_sleeping": True}
    assert (await server.http.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert await server.text(model="small") == "This is small."
    (await server.http.post("/sleep?model=small&level=2")).raise_for_status()
    (await server.http.post("/wake_up?model=small")).raise_for_status()
    assert server.moves("small") == ["sleeps", "wakes"] * 2
    assert server.moves("large") == []


async def test_an_embedding_model_sleeps_and_wakes_too(servers: Make) -> None:
    residents = {"large": Resident("large", MB, preload=True), "embedder": Resident("embedder", MB)}
    server = await servers(residents, MB, encoder=1)
    for _ in range(2):
        found = await server.http.post("/v1/embeddings", json={"input": "text"})
        assert (found.status_code, found.json()["model"]) == (200, "embed"), found.text
        assert await server.text(model="large") == "This is large."
    assert server.moves("embedder") == ["sleeps", "wakes", "sleeps"]
    response = await server.http.post("/v1/embeddings", json={"input": "text", "model": "large"})
    assert "'large' is not an embedding model; there are 'embedder'" in response.json()["error"]["message"]
