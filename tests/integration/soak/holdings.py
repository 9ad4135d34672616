"""What the services hold of requests and calls, and what they should hold of none: places, KV blocks, memory, files."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable

import grpc
import httpx

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.integration.soak.vitals import Vitals
from tests.integration.structured.test_generate import PROMPT

SETTLE_SECONDS = 90.0
MORE_DESCRIPTORS = 0
# Pools of threads start one when all others have something to do, which the warm-up need not have seen.
MORE_THREADS = 2
# MiB: what the C library keeps of the largest bodies that came together, and caches that were not yet full.
MORE_MEMORY = 100
# Bytes that a request for the metrics has itself.
OWN_MEMORY = 65_536
MEMORY = "client memory"


def _values(url: str, names: dict[str, str]) -> dict[str, float]:
    text = httpx.get(url, timeout=30).text
    values = {}
    for name, metric in names.items():
        found = re.search(rf"^{metric} (\S+)$", text, re.MULTILINE)
        assert found, f"{metric} is not among the metrics:\n{text}"
        values[name] = float(found.group(1))
    return values


def held_by_router(url: str) -> dict[str, float]:
    """Returns the places, KV slots and memory that requests have."""
    names = {
        "requests waiting": "tgi_queue_size",
        "requests running": "tgi_batch_current_size",
        "KV slots held": "tgi_batch_current_max_tokens",
        MEMORY: "tgi_client_memory_bytes",
    }
    return _values(f"{url}/metrics", names)


def held_by_front(metrics: str) -> dict[str, float]:
    """Returns the places that calls have. metrics: the URL of the service's metrics."""
    return _values(metrics, {"calls running": "llm_functionalities_calls_running"})


def idle(held: dict[str, float]) -> bool:
    return all(value == 0 or (name == MEMORY and value <= OWN_MEMORY) for name, value in held.items())


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns when the condition is true, or after SETTLE_SECONDS."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.5)


async def places_of_the_front(address: str, calls: int) -> Counter[str]:
    """Makes as many calls at once as there are places. Returns their outcomes."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = llm_pb2_grpc.LLMRunnerStub(channel)
        request = llm_pb2.ModelRequest(formatted_prompt=PROMPT, max_tokens=10, timeout=20_000)
        answers = await asyncio.gather(*(stub.call_model(request) for _ in range(calls)), return_exceptions=True)
    return Counter(type(answer).__name__ if isinstance(answer, Exception) else "answered" for answer in answers)


async def places_of_the_server(url: str, places: int) -> Counter[int]:
    """Sends as many requests at once as there are places. Returns their statuses."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 60, "ignore_eos": True}}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answers = await asyncio.gather(*(http.post("/generate", json=body) for _ in range(places)))
    return Counter(answer.status_code for answer in answers)


def grown(
    before: dict[str, Vitals], after: dict[str, Vitals], more_threads: int = MORE_THREADS
) -> dict[str, tuple[Vitals | None, Vitals]]:
    """Processes that hold more than before, or that were not there."""
    return {
        name: (old, new)
        for name, new in after.items()
        if (old := before.get(name)) is None
        or new.descriptors > old.descriptors + MORE_DESCRIPTORS
        or new.threads > old.threads + more_threads
        or new.resident > old.resident + MORE_MEMORY
    }
