"""The whole server on a GPU. Needs what the router and the shards need: starlette, grpcio and so on."""

import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.gpu.marks import NEEDS_GPU
from tests.tiny_models import make_llama
from tgi_server import demo_model

for _module in (
    "starlette",
    "grpc_health",
    "httptools",
    "llguidance",
    "opentelemetry.sdk",
    "pydantic_settings",
    "uvicorn",
):
    pytest.importorskip(_module)
from tests.servers import TextGenerationServer  # noqa: E402

pytestmark = NEEDS_GPU

PROMPT = "### Instruction:\nHow do I sharpen a chisel?\n\n### Response:\n"


def test_a_server_answers_as_the_same_one_on_a_cpu(server) -> None:
    flags = (f"--model-id={demo_model.PATH}", "--dtype=float32", "--cuda-memory-fraction=0.2")
    on_gpu = server(*flags).wait_until_ready()
    on_cpu = server(*flags, environment={"CUDA_VISIBLE_DEVICES": ""}).wait_until_ready()
    assert httpx.get(f"{on_gpu.url}/info").json()["model_device_type"] == "cuda"
    texts = [each.generate(PROMPT, max_new_tokens=40)["generated_text"] for each in (on_gpu, on_cpu)]
    assert texts[0] == texts[1]


def test_conversations_whose_blocks_run_out_go_on(server, tmp_path: Path) -> None:
    """More requests than the cache holds: some are preempted, all give what they give alone."""
    folder = make_llama(tmp_path)
    flags = (f"--model-id={folder}", "--dtype=float32", "--max-total-tokens=512", "--max-batch-total-tokens=1024")
    running: TextGenerationServer = server(*flags, "--cuda-memory-fraction=0.2").wait_until_ready()
    alone = [running.generate(f"the {number}", max_new_tokens=300)["generated_text"] for number in range(4)]
    with httpx.Client(timeout=120) as client:

        def ask(number: int) -> str:
            body = {"inputs": f"the {number}", "parameters": {"max_new_tokens": 300}}
            return client.post(f"{running.url}/generate", json=body).json()["generated_text"]

        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(ask, [*range(4), *range(4)]))
    assert together == alone * 2


def test_a_device_that_is_lost_ends_the_server(server, tmp_path: Path) -> None:
    lose_device(server, tmp_path, ILLEGAL_ACCESS)


def lose_device(server, tmp_path: Path, fault: str) -> None:
    """Has the shard's third step fail so that its device is lost: the whole server ends, and says why.

    fault: statements that lose the device; a copy of the interpreter's start-up puts them into `Engine.step`.
    """
    (tmp_path / "sitecustomize.py").write_text(START_UP.format(fault=textwrap.indent(fault, " " * 20).strip()))
    environment = {"PYTHONPATH": f"{tmp_path}:{':'.join(filter(None, sys.path))}"}
    running = server(f"--model-id={make_llama(tmp_path / 'model')}", environment=environment).wait_until_ready()
    children = psutil.Process(running.process.pid).children(recursive=True)
    response = httpx.post(
        f"{running.url}/generate", json={"inputs": "the", "parameters": {"max_new_tokens": 50}}, timeout=60
    )
    assert response.status_code >= 400
    deadline = time.monotonic() + 20
    while running.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running.process.poll() not in (None, 0), running.lines()
    assert "the device has failed" in running.lines()
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    running.log.write_text("")  # of the fault the log has a traceback, as it should


# The kernel fails an assertion, after which CUDA refuses everything.
ILLEGAL_ACCESS = 'torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")].sum().item()'
START_UP = '''
import sys
from importlib.abc import MetaPathFinder

class Poison(MetaPathFinder):
    """Changes `Engine.step` once another import has imported its module."""

    def find_spec(self, name, path=None, target=None):
        if name == "tgi_server.shard.service":
            sys.meta_path.remove(self)
            import torch
            from tgi_server.engine.engine import Engine
            whole, calls = Engine.step, []

            def step(engine, *arguments, **settings):
                calls.append(1)
                if len(calls) == 3:
                    {fault}
                return whole(engine, *arguments, **settings)

            Engine.step = step
        return None

sys.meta_path.insert(0, Poison())
'''
