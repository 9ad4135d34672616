"""Whatever the largest bodies hold, the server answers others meanwhile."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
from PIL import Image

from tests.conftest import FreePort
from tests.image_processors import as_data_url, as_file, save_processor
from tests.integration.router.conftest import Router, RouterFactory, shard_process
from tests.integration.router.process import Process, Start, longest_turn
from tests.integration.router.test_bodies import HELLO
from tests.timing import eventually
from tgi_server.router.api.routes.tokenize import MOST_TOKENS

LARGEST = 1_999_900
PROBE_SECONDS = 0.25
TRIES = 8

Body = Callable[[], str]


def filled(frame: str, item: str, join: str = ",") -> Body:
    """The frame with as many items in the place of `@` as the largest body holds."""
    return lambda: frame.replace("@", join.join([item] * ((LARGEST - len(frame)) // (len(item.encode()) + len(join)))))


class Shape(NamedTuple):
    path: str
    name: str
    body: Body


# One of each kind: much text, many objects, many faults, and a large grammar.
SAY = '{"messages":[{"role":"user","content":@}],"max_tokens":3}'
CHATS = {
    "a long message": filled(SAY.replace("@", '"@"'), "rice", " "),
    "messages": filled('{"messages":[@],"max_tokens":3}', '{"role":"","content":""}'),
    "wrong parts": filled(SAY.replace("@", "[@]"), "0"),
}
REGEX = filled('{"inputs":"a","parameters":{"max_new_tokens":2,"grammar":{"type":"regex","value":"@"}}}', "a?", "")
SHAPES = [
    *(Shape(path, name, body) for path in ("/v1/chat/completions", "/chat_tokenize") for name, body in CHATS.items()),
    Shape("/generate", "a large grammar", REGEX),
]


@pytest.fixture
def process(start: Start, flags: tuple[str, list[str]], free_port: FreePort) -> tuple[str, Process]:
    url, values = flags
    running = start(*values)
    running.until_ready(url)
    return url, running


async def worst_health(http: httpx.AsyncClient, asking: "asyncio.Task[httpx.Response]") -> float:
    """The longest time that an answer of /health took while `asking` was under way, in seconds."""
    worst = 0.0
    while not asking.done():
        began = time.perf_counter()
        assert (await http.get("/health")).status_code == 200
        worst = max(worst, time.perf_counter() - began)
        await asyncio.sleep(0.005)
    return worst


async def test_others_are_answered_while_large_bodies_are_read(process: tuple[str, Process]):
    """On a machine that is busy, an answer may be late a few times; the loop's own doing shows every time."""
    url, router = process
    slow: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await http.get("/health")
        for path, name, make in SHAPES:
            body = make()
            assert len(body.encode()) <= 2_000_000, name
            for _ in range(TRIES):
                asking = asyncio.create_task(http.post(path, content=body))
                worst = await worst_health(http, asking)
                response = await asking
                assert response.status_code in (200, 400, 422, 429), (name, response.text[:500])
                print(f"{worst:.3f} {response.status_code} {path} {name}")
                if worst <= PROBE_SECONDS:
                    break
            else:
                slow[f"{path} {name}"] = round(worst, 3)
    assert not slow
    log = router.log.read_text()
    assert "Traceback" not in log
    assert max(map(len, log.splitlines())) < 5_000


@pytest.mark.slow
async def test_prompts_do_not_wait_behind_long_texts(process: tuple[str, Process]):
    """Nor does the memory that long texts took stay."""
    url, router = process
    memory = psutil.Process(router.popen.pid).memory_info
    text = "rice and beans " * 126_000
    prompt = {"inputs": "a prompt of some length " * 100, "parameters": {"max_new_tokens": 2}}
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=100)) as http:
        await http.post("/generate", json=prompt)
        before = memory().rss
        waiting = [asyncio.create_task(http.post("/tokenize", json={"inputs": text})) for _ in range(30)]
        await asyncio.sleep(0.1)
        began = time.perf_counter()
        assert (await http.post("/generate", json=prompt)).status_code == 200
        took = time.perf_counter() - began
        answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {422}
    assert f"more than {MOST_TOKENS} tokens" in answers[0].json()["error"]
    assert took < 5
    assert memory().rss - before < 200 * 2**20


@pytest.mark.slow
async def test_prompts_do_not_wait_behind_texts_that_are_cut(process: tuple[str, Process]):
    url, _ = process
    cut = {"inputs": "rice and beans. " * 120_000, "parameters": {"truncate": 100, "max_new_tokens": 2}}
    prompt = {"inputs": "rice and beans. " * 2_500, "parameters": {"truncate": 4_000, "max_new_tokens": 2}}
    async with httpx.AsyncClient(base_url=url, timeout=100, limits=httpx.Limits(max_connections=100)) as http:
        await http.post("/generate", json=prompt)
        waiting = [asyncio.create_task(http.post("/generate", json=cut)) for _ in range(12)]
        await asyncio.sleep(0.5)
        began = time.perf_counter()
        assert (await http.post("/generate", json=prompt)).status_code == 200
        took = time.perf_counter() - began
        answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {200}
    print(f"took {took:.2f} s")
    assert took < 3


async def test_a_long_text_is_tokenised_as_a_whole(router: Router):
    text = "rice and beans " * 4_000
    tokens = (await router.post("/tokenize", inputs=text)).json()
    assert "".join(token["text"] for token in tokens) == text
    assert len(tokens) > 10_000


async def test_tokenising_takes_a_place(routers: RouterFactory):
    router = await routers(max_concurrent_requests=2)
    text = "1 " * 120_000
    for path, body in (
        ("/tokenize", {"inputs": text}),
        ("/chat_tokenize", {"messages": [{**HELLO[0], "content": text}]}),
    ):
        answers = await asyncio.gather(*(router.post(path, **body) for _ in range(6)))
        statuses = [answer.status_code for answer in answers]
        assert 429 in statuses
        assert 422 in statuses
        await router.idle()
    assert (await router.post("/generate", inputs="Hello", parameters={"max_new_tokens": 2})).status_code == 200


def chats_about_photographs(count: int) -> list[str]:
    """Returns bodies, each with an image of its own of 15 MB, which are 20 MB as a data URL."""
    pixels = random.Random(0).randbytes(3 * 2236 * 2236)
    file = as_file(Image.frombytes("RGB", (2236, 2236), pixels), compress_level=0)
    part = '[{"type":"image_url","image_url":{"url":"@"}}]'
    # What follows the end of a PNG is not read.
    return [SAY.replace("@", part).replace("@", as_data_url(file + bytes([number]))) for number in range(count)]


@pytest.mark.slow
async def test_streams_go_on_while_large_images_arrive_and_their_memory_comes_back(
    start: Start, free_port: FreePort, tmp_path: Path
):
    url, watch = f"http://127.0.0.1:{(port := free_port())}", tmp_path / "watch"
    bodies = chats_about_photographs(10)
    assert 20_000_000 < len(bodies[0]) < 21_000_000
    with shard_process(tmp_path / "shard", "--step-seconds=0.02", "--images") as shard:
        model = save_processor("qwen2_5_vl", tmp_path / "model")
        flags = (f"--tokenizer-name={model}", f"--master-shard-uds-path={shard}", "--hostname=127.0.0.1")
        flags += (f"--port={port}", "--validation-workers=1", "--max-client-memory=4096")
        router = start(*flags, watch=watch).until_ready(url)
        memory = psutil.Process(router.popen.pid).memory_info
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            assert (await http.post("/v1/chat/completions", content=bodies.pop())).status_code == 200
            before = memory().rss
            await longest_turn(watch)
            streaming = [asyncio.create_task(stream_until_done(http, bodies)) for _ in range(4)]
            answers = await asyncio.gather(*(http.post("/v1/chat/completions", content=body) for body in bodies))
            stood = await longest_turn(watch)
            bodies.clear()
            tokens = await asyncio.gather(*streaming)
            assert [answer.status_code for answer in answers] == [200] * 9
            print(f"{(memory().rss - before) / 2**20:.0f} MiB more when all were answered")
            print(f"the loop stood for {stood:.3f} s, streams had {tokens} tokens")
            assert stood < PROBE_SECONDS
            assert min(tokens) > 100
            await eventually(lambda: memory().rss - before < 100 * 2**20)
            print(f"{(memory().rss - before) / 2**20:.0f} MiB more")


async def stream_until_done(http: httpx.AsyncClient, bodies: Sequence[str]) -> int:
    """Streams texts while there are bodies to send. Returns the number of tokens that came."""
    tokens = 0
    while bodies:
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 50}}
        async with http.stream("POST", "/generate_stream", json=body) as response:
            tokens += len([line async for line in response.aiter_lines() if line])
    return tokens
