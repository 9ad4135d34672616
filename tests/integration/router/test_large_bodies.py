"""Whatever the largest bodies hold, the server answers others meanwhile."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import httpx
import psutil
import pytest

from tests.conftest import FreePort
from tests.integration.router.conftest import Router, RouterFactory
from tests.integration.router.process import Process, Start
from tests.integration.router.test_bodies import HELLO
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


async def test_the_loop_is_watched(router: Router):
    await router.until(lambda: _watched(router))


async def _watched(router: Router) -> bool:
    return await router.metric("tgi_event_loop_lag_seconds_count") > 0
