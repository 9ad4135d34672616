"""A router of several models opens the service of one while it serves another."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import FreePort
from tests.fakes.instant_shard import InstantShard
from tests.fakes.instant_shard import start as start_shard
from tests.integration.router.process import Start, longest_turn
from tests.timing import SECONDS
from tgi_server import demo_model

# A turn of the loop while a model is opened. Parsing the tokenizer below takes several times as long.
BOUND_SECONDS = 0.25
ATTEMPTS = 3  # on a busy machine a turn may be long; what is the router's doing is so each time
TOKENS = 400_000


@dataclass
class Launcher:
    """Stands in for the launcher: tells the router about the models' shards.

    writer: to the router; None: not yet. loads: the models that it was to load.
    """

    writer: asyncio.StreamWriter | None = None
    loads: list[int] = field(default_factory=list)

    async def tell(self, model: int, state: str, reason: str = "") -> None:
        async with asyncio.timeout(SECONDS):
            while self.writer is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.writer.write(json.dumps({"model": model, "state": state, "reason": reason}).encode() + b"\n")

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        while line := await reader.readline():
            self.loads.append(json.loads(line)["load"])


def large_vocabulary(folder: Path) -> Path:
    """Makes a model's folder with a tokenizer of many tokens."""
    shutil.copytree(demo_model.PATH, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({f"token{number}": number for number in range(len(vocabulary), TOKENS)})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@asynccontextmanager
async def launching(tmp_path: Path, encoders: Path | None = None) -> AsyncIterator[Launcher]:
    """Runs the shards of two models. encoders: the folder of the second one, if it embeds."""
    launcher = Launcher()
    control = await asyncio.start_unix_server(launcher.connected, tmp_path / "control")
    shards = [
        InstantShard(f"unix://{tmp_path}/shard-0", None, num_blocks=2_048, step_seconds=0.01),
        InstantShard(f"unix://{tmp_path}/shard-1", None, num_blocks=2_048, encoders=encoders),
    ]
    servers = [await start_shard(shard, tmp_path / f"shard-{index}") for index, shard in enumerate(shards)]
    yield launcher
    for server in servers:
        await server.stop(0)
    control.close()


async def state_of(http: httpx.AsyncClient, model: str) -> str:
    listed: list[dict[str, Any]] = (await http.get("/v1/models")).json()["data"]
    return next(str(each["state"]) for each in listed if each["id"] == model)


def describe(
    tmp_path: Path, folders: dict[str, Path], memory_bytes: int | None = None, task: str | None = None
) -> list[str]:
    """Writes what the router of several models reads. Returns its flags. Each model takes a megabyte.

    task: of the last model.
    """
    described = [
        {
            "label": name,
            "arguments": [
                f"--served-model-name={name}",
                f"--tokenizer-name={folder}",
                f"--master-shard-uds-path={tmp_path}/shard-{index}",
            ],
            "pinned": False,
            "idle_seconds": None,
            "priority": 0,
            "bytes": 2**20,
            "task": task if index else None,
        }
        for index, (name, folder) in enumerate(folders.items())
    ]
    file = tmp_path / "models.json"
    content = {"memory_bytes": memory_bytes, "control": str(tmp_path / "control"), "models": described}
    file.write_text(json.dumps(content))
    return [f"--models-file={file}", f"--tokenizer-name={demo_model.PATH}", "--hostname=127.0.0.1"]


@pytest.mark.slow  # it parses a large tokenizer, and starts a router
@pytest.mark.parametrize("task", [None, "embed"])
async def test_streams_of_a_model_go_on_while_another_is_opened(
    tmp_path: Path, start: Start, free_port: FreePort, task: str | None
) -> None:
    port, watch = free_port(), tmp_path / "watch"
    folders = {"served": demo_model.PATH, "opened": large_vocabulary(tmp_path / "model")}
    async with launching(tmp_path, folders["opened"] if task else None) as launcher:
        process = start(*describe(tmp_path, folders, task=task), f"--port={port}", watch=watch)
        await launcher.tell(0, "loaded")
        await asyncio.to_thread(process.until_ready, f"http://127.0.0.1:{port}")
        turns = []
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as http:
            body = {"model": "served", "prompt": "How do I cook rice?", "max_tokens": 3_000, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as stream:
                tokens = stream.aiter_lines()
                while len(turns) < ATTEMPTS and (not turns or turns[-1] > BOUND_SECONDS):
                    if turns:
                        await launcher.tell(1, "failed", "it is tried again")
                    await anext(tokens)
                    await longest_turn(watch)
                    await launcher.tell(1, "loaded")
                    async with asyncio.timeout(SECONDS):
                        while await state_of(http, "opened") != "awake":
                            await anext(tokens)
                    turns.append(await longest_turn(watch))
        assert min(turns) < BOUND_SECONDS, turns


@pytest.mark.slow  # it starts a router
async def test_a_chat_with_a_model_without_a_template_loads_nothing(
    tmp_path: Path, start: Start, free_port: FreePort
) -> None:
    port, plain = free_port(), tmp_path / "plain"
    shutil.copytree(demo_model.PATH, plain, ignore=shutil.ignore_patterns("*.safetensors", "*.jinja"))
    config = json.loads((plain / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(config))
    async with launching(tmp_path) as launcher:
        process = start(*describe(tmp_path, {"served": demo_model.PATH, "plain": plain}, 2**20), f"--port={port}")
        await launcher.tell(0, "loaded")
        await asyncio.to_thread(process.until_ready, f"http://127.0.0.1:{port}")
        chat = {"messages": [{"role": "user", "content": "How do I cook rice?"}], "max_tokens": 4}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as http:
            assert (await http.post("/v1/chat/completions", json={"model": "served", **chat})).status_code == 200
            refused = await http.post("/v1/chat/completions", json={"model": "plain", **chat})
            assert refused.status_code == 400
            assert "no chat template" in refused.json()["error"]["message"]
            assert launcher.loads == [0]
            assert await state_of(http, "served") == "awake"
