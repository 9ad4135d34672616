"""A real server, started and stopped in every way that it meets in life."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import ServerFactory
from tests.integration.launcher.processes import Stream, alive, shard_of, socket_folder
from tests.timing import until


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_server_of_a_folder_ends_on_sigterm_without_a_trace(
    server: ServerFactory, llama_folder: Path, shards: int
) -> None:
    running = server(f"--model-id={llama_folder}", "--dtype=float32", f"--num-shard={shards}").wait_until_ready()
    assert running.generate("the quick", max_new_tokens=5, details=True)["details"]["generated_tokens"] == 5
    assert httpx.get(f"{running.url}/info").json()["model_id"] == llama_folder.name
    processes = re.findall(
        r'process_resident_memory_bytes\{process="([\w-]+)"\}', httpx.get(f"{running.url}/metrics").text
    )
    assert processes == ["router", "launcher", *(f"shard-{rank}" for rank in range(shards))]
    children = psutil.Process(running.process.pid).children(recursive=True)
    folder = socket_folder(shard_of(running, shards - 1))
    stream = Stream(running, tokens=60)
    running.terminate()
    last = stream.finish()
    assert running.wait() == 0
    assert len(stream.events) == 60
    assert last["generated_text"]
    until(lambda: not alive(children))
    assert not folder.exists()
    assert "Traceback" not in running.lines()


@pytest.mark.slow
def test_a_folder_of_medusa_heads_serves_their_model(server: ServerFactory, llama_folder: Path, tmp_path: Path) -> None:
    heads = {f"{head}.0.linear.weight": torch.zeros(64, 64) for head in range(2)}
    heads |= {f"{head}.0.linear.bias": torch.zeros(64) for head in range(2)}
    settings = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": str(llama_folder)}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(heads, tmp_path / "medusa_lm_head.safetensors")
    plain = server(f"--model-id={llama_folder}", "--dtype=float32").wait_until_ready()
    expected = plain.generate("the quick", max_new_tokens=40)["generated_text"]
    assert plain.stop() == 0
    running = server(f"--model-id={tmp_path}", "--dtype=float32").wait_until_ready()
    info = httpx.get(f"{running.url}/info").json()
    assert (info["model_id"], info["speculate"]) == (tmp_path.name, 2)
    assert running.generate("the quick", max_new_tokens=40)["generated_text"] == expected


@pytest.mark.slow
def test_a_stream_that_outlasts_the_termination_timeout_is_cut(server: ServerFactory, llama_folder: Path) -> None:
    running = server(
        f"--model-id={llama_folder}",
        "--dtype=float32",
        "--graceful-termination-timeout=0.1",
        "--max-total-tokens=20000",
        "--allow-long-context",
    ).wait_until_ready()
    stream = Stream(running, tokens=15_000)
    running.terminate()
    assert running.wait(15) == 0
    stream.finish()
    assert len(stream.events) < 15_000
    assert "router: stopped" in running.lines()


@pytest.mark.slow
def test_ctrl_c_stops_it(server: ServerFactory, llama_folder: Path) -> None:
    running = server(f"--model-id={llama_folder}").wait_until_ready()
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 0


@pytest.mark.slow
def test_who_asks_it_to_stop_again_and_again_does_not_make_it_fail(server: ServerFactory, llama_folder: Path) -> None:
    running = server(f"--model-id={llama_folder}").wait_until_ready()
    children = psutil.Process(running.process.pid).children(recursive=True)
    while running.process.poll() is None:
        running.terminate()
        time.sleep(0.01)
    assert running.wait() == 0
    until(lambda: not alive(children))
    assert "Traceback" not in running.lines()


@pytest.mark.slow
def test_a_killed_shard_fails_health_and_ends_the_launcher(server: ServerFactory, llama_folder: Path) -> None:
    running = server(f"--model-id={llama_folder}", "--dtype=float32").wait_until_ready()
    children = psutil.Process(running.process.pid).children(recursive=True)
    folder = socket_folder(running.child("shard"))
    stream = Stream(running, tokens=2000)
    start = time.monotonic()
    running.child("shard").kill()
    health: list[bool] = []
    while running.process.poll() is None:
        health.append(running.is_healthy())
        time.sleep(0.02)
    assert running.wait() == 1
    assert time.monotonic() - start < 10
    assert not any(health[5:])
    assert "shard-0 was killed by SIGKILL" in running.lines().splitlines()[-1]
    assert "error" in stream.finish()
    until(lambda: not alive(children))
    assert not folder.exists()


@pytest.mark.slow
def test_a_killed_router_ends_the_launcher(server: ServerFactory, llama_folder: Path) -> None:
    running = server(f"--model-id={llama_folder}").wait_until_ready()
    children = psutil.Process(running.process.pid).children(recursive=True)
    running.child("router").kill()
    assert running.wait(10) == 1
    assert "router was killed by SIGKILL" in running.lines().splitlines()[-1]
    until(lambda: not alive(children))


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_orphan(server: ServerFactory, llama_folder: Path) -> None:
    running = server(f"--model-id={llama_folder}").wait_until_ready()
    children = psutil.Process(running.process.pid).children(recursive=True)
    assert len(children) >= 2
    folder = socket_folder(running.child("shard"))
    running.process.kill()
    running.wait()
    shutil.rmtree(folder)  # all that a killed launcher leaves
    until(lambda: not alive(children))


@pytest.mark.slow
def test_a_corrupt_weight_file_is_named(server: ServerFactory, llama_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in llama_folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    running = server(f"--model-id={broken}")
    assert running.wait(60) == 1
    last = running.lines().splitlines()[-1]
    assert last.startswith("text-generation-launcher: ")
    assert f"{weights} is corrupt or incomplete" in last
    assert "Traceback" not in running.lines()


def test_a_server_that_is_still_loading_can_be_stopped(server: ServerFactory, llama_folder: Path) -> None:
    running = server(f"--model-id={llama_folder}")
    running.wait_until(lambda: len(psutil.Process(running.process.pid).children()) == 2)
    running.terminate()
    assert running.wait(10) == 0


@pytest.mark.slow
def test_two_servers_do_not_meet(server: ServerFactory, llama_folder: Path) -> None:
    first, second = (server(f"--model-id={llama_folder}") for _ in range(2))
    for each in (first.wait_until_ready(), second.wait_until_ready()):
        each.generate("the", max_new_tokens=1)
    assert first.stop() == 0
    second.generate("the", max_new_tokens=1)


@pytest.mark.slow
def test_json_lines_on_request(server: ServerFactory, llama_folder: Path) -> None:
    running = server(f"--model-id={llama_folder}", "--json-output").wait_until_ready()
    running.generate("the", max_new_tokens=1)
    assert running.stop() == 0
    entries = [json.loads(line) for line in running.lines().splitlines()]
    assert {entry["service"] for entry in entries} == {"launcher", "router", "shard-0"}


@pytest.mark.slow
def test_the_second_start_reads_packed_weights(server: ServerFactory, tmp_path: Path) -> None:
    answers, lines = [], []
    for _ in range(2):
        running = server("--quantize=int4", f"--packed-weights-cache={tmp_path / 'packed'}").wait_until_ready()
        answers.append(running.generate("Tell me how to boil an egg.", max_new_tokens=20, details=True))
        running.stop()
        lines.append(running.lines())
    assert answers[0] == answers[1]
    assert "packed weights are stored in" in lines[0]
    assert "packed weights come from" in lines[1]
    assert "rounding weights" not in lines[1]
