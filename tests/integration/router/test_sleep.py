"""A model that sleeps and wakes, over HTTP; docs/operating.md has the commands."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.servers import TextGenerationServer
from tests.tiny_encoders import make_embedder
from tgi_server import demo_model

PROMPT = "How do I cook rice? " * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sleep")


@pytest.fixture(scope="module")
def running(folder: Path, free_port) -> Iterator[TextGenerationServer]:
    flags = (f"--packed-weights-cache={folder}", f"--prefix-cache-disk=1GiB:{folder}", "--max-batch-total-tokens=65536")
    model = (f"--model-id={demo_model.PATH}", "--dtype=float32", "--enable-sleep-mode")
    server = TextGenerationServer(free_port(), folder / "server.log", *model, *flags)
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


@pytest.fixture
def client(running: TextGenerationServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=60) as client:
        yield client
        client.post("/wake_up").raise_for_status()


def sleeps(client: httpx.Client) -> bool:
    return bool(client.get("/is_sleeping").raise_for_status().json()["is_sleeping"])


def asked(client: httpx.Client, prompt: str = PROMPT, **fields: Any) -> tuple[Any, int]:
    """Returns text and log-probabilities, and the number of cached tokens."""
    body = {"model": "tgi", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 2, **fields}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    choice, usage = answer["choices"][0], answer["usage"]
    return (choice["text"], choice["logprobs"]), usage["prompt_tokens_details"]["cached_tokens"]


def fall_asleep(client: httpx.Client) -> None:
    client.post("/sleep").raise_for_status()
    assert sleeps(client)


def metric(client: httpx.Client, name: str) -> float:
    (line,) = (line for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[1])


def test_a_request_wakes_the_model_and_gets_the_same_bits_with_its_prefix_from_disk(
    running: TextGenerationServer, client: httpx.Client
) -> None:
    shard = running.child("shard")
    before, _ = asked(client)
    for _ in range(2):  # the second time, the file is there
        awake = shard.memory_info().rss
        fall_asleep(client)
        assert metric(client, "tgi_asleep") == 1
        assert shard.memory_info().rss < awake - (8 << 20)
        assert client.get("/health").status_code == 200
        after, cached = asked(client)
        assert after == before
        assert cached >= 256
        assert not sleeps(client)
        assert metric(client, "tgi_asleep") == 0
    assert metric(client, "tgi_wake_duration_count") >= 2


def test_requests_are_answered_that_come_while_it_falls_asleep_or_wakes(client: httpx.Client) -> None:
    expected = {number: asked(client, f"Dish number {number}:")[0] for number in range(4)}
    with ThreadPoolExecutor(12) as threads:
        for turn in range(3):
            asleep = threads.submit(client.post, "/sleep")
            answers = {}
            for number in range(8):
                answers[number] = threads.submit(asked, client, f"Dish number {number % 4}:")
                time.sleep(0.01 * turn)
            assert asleep.result().status_code == 200
            assert {number: answer.result()[0] for number, answer in answers.items()} == {
                number: expected[number % 4] for number in answers
            }


def test_a_running_request_is_computed_to_its_end_before(client: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as threads:
        body = {"model": "tgi", "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            asleep = threads.submit(client.post, "/sleep")
            assert list(lines)[-2] == "data: [DONE]"
        assert asleep.result().status_code == 200
    assert sleeps(client)


def test_a_request_that_would_be_late_is_refused_at_once(client: httpx.Client) -> None:
    fall_asleep(client)
    client.post("/wake_up").raise_for_status()  # so the time is known
    fall_asleep(client)
    body = {"model": "tgi", "prompt": "Hello", "max_tokens": 1, "timeout_ms": 1}
    refused = client.post("/v1/completions", json=body)
    assert refused.status_code in (503, 504)
    assert refused.headers["x-error-code"] in ("deadline_unreachable", "deadline_exceeded")
    assert sleeps(client)


def test_the_tables_for_grammars_are_given_up_at_the_second_level(
    running: TextGenerationServer, client: httpx.Client
) -> None:
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "array", "items": {"enum": [1, 2]}}},
    }
    body = {"model": "tgi", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    answers = []
    for _ in range(2):
        answer = client.post("/v1/chat/completions", json={**body, "response_format": schema}).raise_for_status().json()
        answers.append(answer["choices"][0]["message"]["content"])
        client.post("/sleep", params={"level": 2}).raise_for_status()
        assert sleeps(client)
        assert not running.child("shard").children()
    assert answers[0].startswith("[")
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("route", "parameters", "message"),
    [
        ("/sleep", {"level": 3}, "`level` is '3'; it must be 1 or 2"),
        ("/sleep", {"mode": "abort"}, "`mode` is 'abort'; it must be wait"),
        ("/wake_up", {"tags": "weights"}, "`tags` must be left out, or name both"),
    ],
)
def test_parameters_are_refused_by_name(client: httpx.Client, route: str, parameters: Any, message: str) -> None:
    refused = client.post(route, params=parameters)
    assert refused.status_code == 422
    assert message in refused.text


def test_nothing_is_left_of_a_model_that_was_killed_asleep(
    folder: Path, free_port, running: TextGenerationServer
) -> None:
    server = TextGenerationServer(
        free_port(),
        folder / "killed.log",
        *(f"--model-id={demo_model.PATH}", "--dtype=float32", "--enable-sleep-mode"),
        f"--packed-weights-cache={folder}/killed",
    ).wait_until_ready()
    httpx.post(f"{server.url}/sleep", timeout=60).raise_for_status()
    shard = server.child("shard")
    assert not list((folder / "killed").rglob("*.unfinished"))
    shard.send_signal(signal.SIGKILL)
    assert server.wait() == 1
    assert not psutil.pid_exists(shard.pid)
    assert not list((folder / "killed").rglob("*.unfinished"))


def test_a_model_without_a_folder_stays_awake(demo_server: TextGenerationServer, server: Any) -> None:
    forbidden = httpx.post(f"{demo_server.url}/sleep")
    assert forbidden.status_code == 403
    assert "without --enable-sleep-mode" in forbidden.json()["error"]
    running = server(f"--model-id={demo_model.PATH}", "--enable-sleep-mode").wait_until_ready()
    refused = httpx.post(f"{running.url}/sleep", timeout=60)
    assert refused.status_code == 409
    assert "--packed-weights-cache is none" in refused.json()["error"]
    assert running.generate("Hello", max_new_tokens=2)["generated_text"]


def test_an_embedder_sleeps_too(server: Any, tmp_path: Path) -> None:
    model = make_embedder("bert", tmp_path / "model", hidden_size=512, intermediate_size=2048)
    running = server(
        f"--embedding-model-id={model}", "--enable-sleep-mode", f"--packed-weights-cache={tmp_path}"
    ).wait_until_ready()
    with httpx.Client(base_url=running.url, timeout=60) as client:
        before = client.post("/embed", json={"inputs": ["one", "two"]}).raise_for_status().json()
        for _ in range(2):
            fall_asleep(client)
            assert client.post("/embed", json={"inputs": ["one", "two"]}).raise_for_status().json() == before
            assert not sleeps(client)
