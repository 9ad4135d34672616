"""`text-generation-benchmark` on a server that runs."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.conftest import ServerFactory
from tgi_server import demo_model


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_a_running_server_is_measured_and_serves_on(server: ServerFactory, tmp_path: Path) -> None:
    prefix = tmp_path / "sockets"
    flags = (f"--model-id={demo_model.PATH}", f"--shard-uds-path={prefix}", "--max-batch-size=4")
    running = server(*flags).wait_until_ready()
    before = running.generate("How long do I boil an egg?", max_new_tokens=20)["generated_text"]
    output = tmp_path / "results.json"
    command = [
        *(sys.executable, "-m", "tgi_server.benchmark.cli", "-m", f"{prefix}-0", "-t", str(demo_model.PATH)),
        *("-s", "10", "-s", "100", "-d", "6", "--runs", "2", "--output", str(output)),
    ]
    refused = run(command)
    assert refused.returncode == 1
    assert refused.stderr == (
        "text-generation-benchmark: a router is connected to these shards, and its requests will fail meanwhile; add "
        "--yes to continue\n"
    )
    assert running.generate("How long do I boil an egg?", max_new_tokens=20)["generated_text"] == before
    benchmark = run([*command, "--yes"])
    assert benchmark.returncode == 0, benchmark.stderr
    assert len(benchmark.stdout.splitlines()) == 2 + 6
    content = json.loads(output.read_text())
    cases = [(case["batch_size"], case["sequence_length"]) for case in content["cases"]]
    assert cases == [(size, length) for size in (1, 2, 4) for length in (10, 100)]
    for case in content["cases"]:
        assert (case["error"], len(case["prefill_seconds"]), len(case["decode_seconds"])) == (None, 2, 10)
    # The request that finds its place taken fails, and those after it are served as before.
    body = {"inputs": "How long do I boil an egg?", "parameters": {"max_new_tokens": 20}}
    assert httpx.post(f"{running.url}/generate", json=body, timeout=30).status_code in (200, 424, 500)
    assert running.generate("How long do I boil an egg?", max_new_tokens=20)["generated_text"] == before
